"""Texts for the quality rules: one just inside and one just outside each limit."""

from batchloom.text import C4, FineWeb, Gopher, Repetition
from batchloom.text.quality.c4 import make_c4_step as make_c4
from batchloom.text.quality.fineweb import make_fineweb_step as make_fineweb
from batchloom.text.quality.gopher import make_gopher_step as make_gopher
from batchloom.text.quality.repetition import make_repetition_step as make_repetition

STEPS = {
    "c4": make_c4(C4()),
    "gopher": make_gopher(Gopher()),
    "repetition": make_repetition(Repetition()),
    "fineweb": make_fineweb(FineWeb()),
}


def make_words(count: int, start: int = 0) -> list[str]:
    """Return distinct words of letters, six characters each."""
    letters = "bcdfghjklm"
    return ["x" + "".join(letters[int(d)] for d in f"{n:05}") for n in range(start, start + count)]


def make_gopher_text(count: int) -> str:
    """Return a text of ``count`` words, two of them stop words."""
    return " ".join(["the", "and", *make_words(count - 2)])


def make_lines(count: int, other_lines: list[str]) -> str:
    return "\n".join([f"the and {' '.join(make_words(8, 8 * n))}" for n in range(count)] + other_lines)


def pad_to_size(beginning: str, size: int) -> str:
    """Return a beginning followed by distinct words, ``size`` characters in all."""
    padding = " ".join(make_words(size))[: size - len(beginning) - 1]
    return f"{beginning} {padding}"


def make_parts(between: str, other_count: int) -> str:
    """Return four equal parts and others that differ."""
    return between.join([*(" ".join(make_words(20, 20 * n)) for n in range(other_count)), *["x"] * 4])


def make_repetition_text(between: str, size: int) -> str:
    """Return five parts of ``size`` characters; one of 40 characters is repeated."""
    part = "q" * 40
    return pad_to_size(between.join([part, part, *make_words(2, 1000), ""]), size)


def make_duplicate_ngrams(n: int, share: int, missing_characters: int) -> str:
    """Return ten n-grams that occur twice, ``share`` % of the text or slightly more."""
    blocks = [" ".join(make_words(n, 50_000 + n * index)) for index in range(10)]
    between = make_words(20, 60_000)
    text = " ".join(f"{block} {word}" for block, word in zip(blocks * 2, between, strict=True))
    return pad_to_size(text, -(-60 * n * 100 // share) - missing_characters)


def make_ended_lines(count: int) -> str:
    """Return 100 lines, ``count`` of them with a full stop."""
    ended_lines = [f"{' '.join(make_words(6, 6 * n))}." for n in range(count)]
    return "\n".join(ended_lines + [" ".join(make_words(6, 600 + 6 * n)) for n in range(100 - count)])


def make_short_lines(count: int) -> str:
    """Return 100 lines, ``count`` of them of 30 characters."""
    short_lines = [f"{' '.join(make_words(4, 4 * n))} a." for n in range(count)]
    long_lines = [f"{' '.join(make_words(9, 500 + 9 * n))}." for n in range(100 - count)]
    return "\n".join(short_lines + long_lines)


def make_repeated_line(size: int) -> str:
    """Return a line of 8 characters twice, in ``size`` characters without newlines."""
    padding = " ".join(make_words(200))[: size - 16].strip()
    return "abcdefg.\nabcdefg.\n" + padding.ljust(size - 16, ".")


def make_four_lines(last_words: str) -> str:
    return "\n".join([*(f"{'w' * 31} {word}" for word in make_words(3)), f"{'w' * 31} {last_words}"])


SENTENCE = "This is one of the sentences."
FIVE = "\n".join([SENTENCE] * 5)
BULLETS = " ".join(make_words(9, 100))
ELLIPSES = " ".join(make_words(20, 990))

# Step, text just inside, text just outside, and the reason. Inside, another rule may drop the text.
EDGES = [
    ("gopher", make_gopher_text(50), make_gopher_text(49), "gopher: too few words"),
    ("gopher", make_gopher_text(100_000), make_gopher_text(100_001), "gopher: too many words"),
    (
        "gopher",
        "the and " + "abc " * 48,
        "the and " + "abc " * 47 + "ab",
        "gopher: words too short",
    ),
    (
        "gopher",
        f"the and {('z' * 10 + ' ') * 46}{'z' * 17} {'z' * 17}",
        f"the and {('z' * 10 + ' ') * 46}{'z' * 17} {'z' * 18}",
        "gopher: words too long",
    ),
    (
        "gopher",
        make_gopher_text(90) + " #" * 10,
        make_gopher_text(89) + " #" * 10,
        "gopher: too many hash signs",
    ),
    (
        "gopher",
        "… " * 10 + make_gopher_text(90),
        "... " * 10 + make_gopher_text(89),
        "gopher: too many ellipses",
    ),
    (
        "gopher",
        make_lines(10, [f"- {BULLETS}"] * 90),
        make_lines(9, [f"• {BULLETS}"] * 91),
        "gopher: too many lines begin with a bullet",
    ),
    (
        "gopher",
        make_lines(70, [f"{ELLIPSES}..."] * 30),
        make_lines(69, [f"{ELLIPSES}…"] * 31),
        "gopher: too many lines end with an ellipsis",
    ),
    (
        "gopher",
        make_gopher_text(80) + " 123" * 20,
        make_gopher_text(79) + " 123" * 21,
        "gopher: too few words with a letter",
    ),
    (
        "gopher",
        make_gopher_text(60),
        f"the the The AND {' '.join(make_words(60))}",
        "gopher: too few stop words",
    ),
    ("repetition", "x", "", "repetition: empty"),
    ("repetition", make_parts("\n\n", 6), make_parts("\n\n\n", 5), "repetition: duplicate paragraphs"),
    ("repetition", make_parts("\n", 6), make_parts("\n", 5), "repetition: duplicate lines"),
    (
        "repetition",
        make_repetition_text("\n\n", 200),
        make_repetition_text("\n\n", 199),
        "repetition: characters in duplicate paragraphs",
    ),
    (
        "repetition",
        make_repetition_text("\n", 200),
        make_repetition_text("\n", 199),
        "repetition: characters in duplicate lines",
    ),
    (
        "repetition",
        pad_to_size("aa bb cc aa bb dd aa bb ee aa bb", 100),
        pad_to_size("aa bb cc aa bb dd aa bb ee aa bb", 99),
        "repetition: most frequent 2-gram",
    ),
    (
        "repetition",
        pad_to_size("aaa bbb ccc d aaa bbb ccc e aaa bbb ccc", 184),
        pad_to_size("aaa bbb ccc d aaa bbb ccc e aaa bbb ccc", 183),
        "repetition: most frequent 3-gram",
    ),
    (
        "repetition",
        pad_to_size("a b c ddddddd e a b c ddddddd f a b c ddddddd g", 244),
        pad_to_size("a b c ddddddd e a b c ddddddd f a b c ddddddd g", 243),
        "repetition: most frequent 4-gram",
    ),
    *(
        (
            "repetition",
            make_duplicate_ngrams(n, share, 0),
            make_duplicate_ngrams(n, share, 1),
            f"repetition: duplicate {n}-grams",
        )
        for n, share in ((5, 15), (6, 14), (7, 13), (8, 12), (9, 11), (10, 10))
    ),
    ("fineweb", f"{SENTENCE} {SENTENCE}", " \n\t\n", "fineweb: empty"),
    ("fineweb", make_ended_lines(12), make_ended_lines(11), "fineweb: too few lines end with punctuation"),
    ("fineweb", make_short_lines(67), make_short_lines(68), "fineweb: too many short lines"),
    ("fineweb", make_repeated_line(800), make_repeated_line(799), "fineweb: too many characters in duplicate lines"),
    ("fineweb", make_four_lines("a b c."), make_four_lines("a b."), "fineweb: too many newlines"),
    ("c4", FIVE, "\n".join([SENTENCE] * 4), "c4: too few sentences"),
    ("c4", f"{FIVE}\nNo lorem, but ipsum.", f"{FIVE}\nHere is Lorem Ipsum.", "c4: lorem ipsum"),
    ("c4", f"{FIVE}\na {{ b c", f"{FIVE}\na {{ b c.", "c4: curly bracket"),
]
