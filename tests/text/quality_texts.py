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


def names(count: int, start: int = 0) -> list[str]:
    """Distinct words of letters alone, six characters each."""
    letters = "bcdfghjklm"
    return ["x" + "".join(letters[int(d)] for d in f"{n:05}") for n in range(start, start + count)]


def gopher_text(count: int) -> str:
    """A text of ``count`` words, two of them stop words."""
    return " ".join(["the", "and", *names(count - 2)])


def lines(kept: int, others: list[str]) -> str:
    return "\n".join([f"the and {' '.join(names(8, 8 * n))}" for n in range(kept)] + others)


def sized(part: str, size: int) -> str:
    """``part`` followed by distinct words, ``size`` characters in all."""
    rest = " ".join(names(size))[: size - len(part) - 1]
    return f"{part} {rest}"


def parted(between: str, others: int) -> str:
    """Four equal parts and others that differ."""
    return between.join([*(" ".join(names(20, 20 * n)) for n in range(others)), *["x"] * 4])


def repeating(between: str, size: int) -> str:
    """One of five parts repeated, its 40 characters among ``size`` in all."""
    part = "q" * 40
    return sized(between.join([part, part, *names(2, 1000), ""]), size)


def with_duplicates(n: int, share: int, less: int) -> str:
    """Ten n-grams that occur twice; their characters are ``share`` % of the text, or just more."""
    blocks = [" ".join(names(n, 50_000 + n * at)) for at in range(10)]
    between = names(20, 60_000)
    text = " ".join(f"{block} {word}" for block, word in zip(blocks * 2, between, strict=True))
    return sized(text, -(-60 * n * 100 // share) - less)


def ended(count: int) -> str:
    """100 lines, ``count`` of them with a full stop."""
    marked = [f"{' '.join(names(6, 6 * n))}." for n in range(count)]
    return "\n".join(marked + [" ".join(names(6, 600 + 6 * n)) for n in range(100 - count)])


def short_lines(count: int) -> str:
    """100 lines, ``count`` of them of 30 characters."""
    short = [f"{' '.join(names(4, 4 * n))} a." for n in range(count)]
    rest = [f"{' '.join(names(9, 500 + 9 * n))}." for n in range(100 - count)]
    return "\n".join(short + rest)


def twice_in(size: int) -> str:
    """A line of 8 characters twice, in ``size`` characters without newlines."""
    rest = " ".join(names(200))[: size - 16].strip()
    return "abcdefg.\nabcdefg.\n" + rest.ljust(size - 16, ".")


def of_four_lines(last: str) -> str:
    return "\n".join([*(f"{'w' * 31} {word}" for word in names(3)), f"{'w' * 31} {last}"])


SENTENCE = "This is one of the sentences."
FIVE = "\n".join([SENTENCE] * 5)
BULLETS = " ".join(names(9, 100))
ELLIPSES = " ".join(names(20, 990))

# Step, text just inside, text just outside, and the reason. Inside, another rule may speak.
EDGES = [
    ("gopher", gopher_text(50), gopher_text(49), "gopher: too few words"),
    ("gopher", gopher_text(100_000), gopher_text(100_001), "gopher: too many words"),
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
        gopher_text(90) + " #" * 10,
        gopher_text(89) + " #" * 10,
        "gopher: too many hash signs",
    ),
    (
        "gopher",
        "… " * 10 + gopher_text(90),
        "... " * 10 + gopher_text(89),
        "gopher: too many ellipses",
    ),
    (
        "gopher",
        lines(10, [f"- {BULLETS}"] * 90),
        lines(9, [f"• {BULLETS}"] * 91),
        "gopher: too many lines begin with a bullet",
    ),
    (
        "gopher",
        lines(70, [f"{ELLIPSES}..."] * 30),
        lines(69, [f"{ELLIPSES}…"] * 31),
        "gopher: too many lines end with an ellipsis",
    ),
    (
        "gopher",
        gopher_text(80) + " 123" * 20,
        gopher_text(79) + " 123" * 21,
        "gopher: too few words with a letter",
    ),
    (
        "gopher",
        gopher_text(60),
        f"the the The AND {' '.join(names(60))}",
        "gopher: too few stop words",
    ),
    ("repetition", "x", "", "repetition: empty"),
    ("repetition", parted("\n\n", 6), parted("\n\n\n", 5), "repetition: duplicate paragraphs"),
    ("repetition", parted("\n", 6), parted("\n", 5), "repetition: duplicate lines"),
    (
        "repetition",
        repeating("\n\n", 200),
        repeating("\n\n", 199),
        "repetition: characters in duplicate paragraphs",
    ),
    (
        "repetition",
        repeating("\n", 200),
        repeating("\n", 199),
        "repetition: characters in duplicate lines",
    ),
    (
        "repetition",
        sized("aa bb cc aa bb dd aa bb ee aa bb", 100),
        sized("aa bb cc aa bb dd aa bb ee aa bb", 99),
        "repetition: most frequent 2-gram",
    ),
    (
        "repetition",
        sized("aaa bbb ccc d aaa bbb ccc e aaa bbb ccc", 184),
        sized("aaa bbb ccc d aaa bbb ccc e aaa bbb ccc", 183),
        "repetition: most frequent 3-gram",
    ),
    (
        "repetition",
        sized("a b c ddddddd e a b c ddddddd f a b c ddddddd g", 244),
        sized("a b c ddddddd e a b c ddddddd f a b c ddddddd g", 243),
        "repetition: most frequent 4-gram",
    ),
    *(
        (
            "repetition",
            with_duplicates(n, share, 0),
            with_duplicates(n, share, 1),
            f"repetition: duplicate {n}-grams",
        )
        for n, share in ((5, 15), (6, 14), (7, 13), (8, 12), (9, 11), (10, 10))
    ),
    ("fineweb", f"{SENTENCE} {SENTENCE}", " \n\t\n", "fineweb: empty"),
    ("fineweb", ended(12), ended(11), "fineweb: too few lines end with punctuation"),
    ("fineweb", short_lines(67), short_lines(68), "fineweb: too many short lines"),
    ("fineweb", twice_in(800), twice_in(799), "fineweb: too many characters in duplicate lines"),
    ("fineweb", of_four_lines("a b c."), of_four_lines("a b."), "fineweb: too many newlines"),
    ("c4", FIVE, "\n".join([SENTENCE] * 4), "c4: too few sentences"),
    ("c4", f"{FIVE}\nNo lorem, but ipsum.", f"{FIVE}\nHere is Lorem Ipsum.", "c4: lorem ipsum"),
    ("c4", f"{FIVE}\na {{ b c", f"{FIVE}\na {{ b c.", "c4: curly bracket"),
]
