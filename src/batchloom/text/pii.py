"""Masking of personal data: emails, public addresses, card and phone numbers.

Emails and IPv4 addresses are found and replaced as in FineWeb (datatrove's PIIFormatter, Apache-2.0;
Penedo et al. 2024), except for runs of more than four numbers, which are versions. The first
match of a document gets the first mask, and so on in rotation. Masks are addresses and numbers
themselves, so a second run changes nothing except text on the same line that is matched together with a mask.

Each search starts from a rare character and checks its surroundings, so time is
linear in the text for any input.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batchloom.core.settings import raise_problems
from batchloom.text.steps import CleanFunction

SpanFinder = Callable[[str], Iterator[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiiSettings:
    """Settings of the step ``pii``.

    Attributes:
        emails: mask email addresses.
        ips: mask public IPv4 and IPv6 addresses.
        phones: mask phone numbers: ``+`` and 8 to 15 digits, and the North
            American ``(ddd) ddd-dddd``, ``ddd-ddd-dddd`` and ``ddd.ddd.dddd``.
        cards: mask payment card numbers that pass the Luhn check.
        email_masks: replacements for emails; these domains are reserved for examples.
        ipv4_masks: replacements for IPv4 addresses, as in FineWeb; they answered no requests.
        ipv6_masks: replacements for IPv6 addresses; the prefix is reserved for documentation.
        phone_masks: replacements for phone numbers; the number is reserved for fiction.
        card_masks: replacements for card numbers; the number is for tests.
    """

    emails: bool = True
    ips: bool = True
    phones: bool = True
    cards: bool = True
    email_masks: tuple[str, ...] = ("email@example.com", "firstname.lastname@example.org")
    ipv4_masks: tuple[str, ...] = (
        "22.214.171.124",
        "126.96.36.199",
        "188.8.131.52",
        "184.108.40.206",
        "220.127.116.11",
        "18.104.22.168",
    )
    ipv6_masks: tuple[str, ...] = ("2001:db8::1",)
    phone_masks: tuple[str, ...] = ("202-555-0100",)
    card_masks: tuple[str, ...] = ("4111111111111111",)

    def __post_init__(self) -> None:
        kinds = ("email_masks", "ipv4_masks", "ipv6_masks", "phone_masks", "card_masks")
        raise_problems([f"{name}: give at least one ('' to delete)" for name in kinds if not getattr(self, name)])


def make_pii_step(settings: PiiSettings) -> CleanFunction:
    finds: list[tuple[SpanFinder, tuple[str, ...]]] = []
    if settings.emails:
        finds.append((_find_emails, settings.email_masks))
    if settings.ips:
        finds += [(_find_ipv4, settings.ipv4_masks), (_find_ipv6, settings.ipv6_masks)]
    if settings.phones:
        finds.append((_find_international_phones, settings.phone_masks))

    def clean(text: str) -> str:
        for find, masks in finds:
            text = _mask_spans(text, find, masks)
        shapes = text.encode("utf-8", "replace").translate(_DIGIT_SHAPE_TABLE)
        if settings.cards and any(shape in shapes for shape in _CARD_SHAPES):
            text = _mask_spans(text, _find_cards, settings.card_masks)
        if settings.phones and _PHONE_SHAPE in shapes:
            text = _mask_spans(text, _find_american_phones, settings.phone_masks)
        return text

    return clean


def _mask_spans(text: str, find: SpanFinder, masks: tuple[str, ...]) -> str:
    parts: list[str] = []
    position = 0
    for number, (start, stop) in enumerate(find(text)):
        parts += [text[position:start], masks[number % len(masks)]]
        position = stop
    return "".join([*parts, text[position:]]) if parts else text


_EMAIL_ATOM = r"A-Za-z0-9!#$%&'*+/=?^_`{|}~\-"
_LOCAL_REVERSED = re.compile(rf"[{_EMAIL_ATOM}]++(?:\.[{_EMAIL_ATOM}]++)*+")
_LOCAL_START = re.compile(r"\b[^.]")
_OCTET = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_DOMAIN_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_DOMAIN = re.compile(
    rf"(?:{_DOMAIN_LABEL}\.)+{_DOMAIN_LABEL}|\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]"
)


def _find_emails(text: str) -> Iterator[tuple[int, int]]:
    """Yield spans around each ``@``: the domain, and the longest local part before it."""
    search_start = 0
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        if domain is not None:
            local = _LOCAL_REVERSED.match(text[search_start:at][::-1])
            start = local and _LOCAL_START.search(text, at - local.end(), at)
            if start:
                yield start.start(), domain.end()
        # Neither part can hold an @, and text after a domain was already checked.
        search_start = at + 1 if domain is None else max(at + 1, domain.end())
        at = text.find("@", at + 1)


_IPV4_TAIL = re.compile(r"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}+(?![0-9])")
_WORD_CHARACTER = re.compile(r"\w")
_IPV4_HEAD = re.compile(r"(?<![\w.])[0-9]{1,3}\Z")
_CONTINUATION = re.compile(r"\w|\.\w")

# Special-purpose registry of IANA (RFC 6890) as first addresses and prefix lengths, spelled
# out because ipaddress differs between Python versions.
_PRIVATE_NETWORKS = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "2001:db8::/32",
        "3fff::/20",
    )
]


def _is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not any(parsed in network for network in _PRIVATE_NETWORKS)


def _find_ipv4(text: str) -> Iterator[tuple[int, int]]:
    for numbers in _IPV4_TAIL.finditer(text):
        at = numbers.start()
        first = _IPV4_HEAD.search(text[max(0, at - 4) : at])
        if first is None or _CONTINUATION.match(text, numbers.end()):
            continue
        start = at - len(first[0])
        if _is_public(text[start : numbers.end()]):
            yield start, numbers.end()


# Global unicast addresses begin with 2 or 3 (RFC 4291), which distinguishes them from C++ names.
_IPV6_GROUPS = re.compile(r":(?<=[23][0-9A-Fa-f]{3}:)[0-9A-Fa-f:]++(?!\w|\.\w)")


def _find_ipv6(text: str) -> Iterator[tuple[int, int]]:
    for groups in _IPV6_GROUPS.finditer(text):
        start = groups.start() - 4
        stop = groups.end()
        if stop - start > 40 or (start and (_WORD_CHARACTER.match(text[start - 1]) or text[start - 1] in ":.")):
            continue
        if text[stop - 1] == ":" and text[stop - 2] != ":":
            stop -= 1
        if _is_public(text[start:stop]):
            yield start, stop


# Numbers are searched for only in texts that contain one of these digit shapes.
_DIGIT_SHAPE_TABLE = bytes.maketrans(b"0123456789 .", b"0000000000--")
_CARD_SHAPES = (b"00000000", b"0000-0000", b"0000-000000")
_PHONE_SHAPE = b"000-0000"
_CARD_PATTERN = re.compile(
    r"[2-6](?<![\w.+\-][2-6])(?:[0-9]{12,18}"
    r"|[0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{3})?"
    r"|[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5})(?![\w-]|\.[0-9])"
)
# ISO/IEC 7812: Visa, Mastercard, American Express, Discover, Diners Club, JCB, UnionPay.
_CARD_ISSUER = re.compile(
    r"4|5[1-5]|2(?:22[1-9]|2[3-9]|[3-6]|7[01]|720)|3[47]|6(?:011|4[4-9]|5|2)|3(?:0[0-5]|[689])|35(?:2[89]|[3-8])"
)
_NON_DIGITS = re.compile("[^0-9]")


def _find_cards(text: str) -> Iterator[tuple[int, int]]:
    for card in _CARD_PATTERN.finditer(text):
        digits = _NON_DIGITS.sub("", card[0])
        if _CARD_ISSUER.match(digits) and passes_luhn(digits):
            yield card.span()


def passes_luhn(digits: str) -> bool:
    """Return whether the last digit is the check digit (ISO/IEC 7812-1, annex B)."""
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


_INTERNATIONAL_PHONE = re.compile(
    r"\+(?<![\w+.]\+)[1-9][0-9]{0,14}+(?:[ .-]?\([0-9]{1,4}+\)[0-9]{0,12}+|[ .-][0-9]{2,14}+){0,6}+"
)
_PHONE_GROUP = re.compile(r"[^0-9]*+[0-9]++\)?")


def _find_international_phones(text: str) -> Iterator[tuple[int, int]]:
    """Yield ``+`` and digit groups of at least 8 and at most 15 digits (E.164)."""
    if "+" not in text:
        return
    for number in _INTERNATIONAL_PHONE.finditer(text):
        digits = 0
        stop = 0
        for group in _PHONE_GROUP.finditer(number[0]):
            digits += sum(map(str.isdigit, group[0]))
            if digits > 15:
                break
            stop = number.start() + group.end() if digits >= 8 else 0
        if stop and not _WORD_CHARACTER.match(text, stop):
            yield number.start(), stop


_AMERICAN_PHONE = re.compile(
    r"[1-9(](?<![\w.+\-][1-9(])(?:(?<=1)[-. ][2-9(](?<=[^(]))?"
    r"(?:(?<=\()[2-9][0-9]{2}\) ?|(?<=[2-9])[0-9]{2}([-.]))"
    r"[2-9][0-9]{2}(?(1)\1|[-.])[0-9]{4}(?![\w-]|\.[0-9])"
)


def _find_american_phones(text: str) -> Iterator[tuple[int, int]]:
    for number in _AMERICAN_PHONE.finditer(text):
        yield number.span()
