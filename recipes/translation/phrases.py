"""English phrases and their German, made by two small grammars: numbers in words, prices, times of
the day, dates, sums.

Small, but a translation: German says the ones before the tens, half of the coming hour, and a date
with other endings.
"""

from __future__ import annotations

import random

_EN = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_EN_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_EN_ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
]
_EN_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_DE = [
    "null",
    "eins",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
]
_DE_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
_DE_ORDINALS = [
    "ersten",
    "zweiten",
    "dritten",
    "vierten",
    "fünften",
    "sechsten",
    "siebten",
    "achten",
]
_DE_MONTHS = [
    "Januar",
    "Februar",
    "März",
    "April",
    "Mai",
    "Juni",
    "Juli",
    "August",
    "September",
    "Oktober",
    "November",
    "Dezember",
]


def english(number: int) -> str:
    """``number`` below a million in words."""
    if number < 20:
        return _EN[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _EN_TENS[tens - 2] + (f"-{_EN[ones]}" if ones else "")
    size, word = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, size)
    joint = " and " if rest < 100 else " "
    return f"{english(many)} {word}" + (joint + english(rest) if rest else "")


def german(number: int) -> str:
    """The same in German, which writes it as one word."""
    if number < 20:
        return _DE[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return (f"{_before(ones)}und" if ones else "") + _DE_TENS[tens - 2]
    size, word = (1000, "tausend") if number >= 1000 else (100, "hundert")
    many, rest = divmod(number, size)
    return _before(many) + word + (german(rest) if rest else "")


def _before(number: int) -> str:
    """A number inside a longer one: "eins" loses its end there."""
    word = german(number)
    return word.removesuffix("s") if word.endswith("eins") else word


def _number(draw: random.Random) -> tuple[str, str]:
    number = draw.randrange(10 ** draw.choice((2, 3, 4, 6)))
    return english(number), german(number)


def _price(draw: random.Random) -> tuple[str, str]:
    euros, cents = draw.randrange(2, 1000), draw.randrange(2, 100)
    return (
        f"it costs {english(euros)} euros and {english(cents)} cents",
        f"es kostet {german(euros)} Euro und {german(cents)} Cent",
    )


def _time(draw: random.Random) -> tuple[str, str]:
    hour, kind = draw.randrange(2, 12), draw.randrange(4)
    if kind == 0:
        return f"at half past {english(hour)}", f"um halb {german(hour + 1)}"
    minutes = draw.choice((5, 10, 20))
    if kind == 1:
        return (
            f"at {english(minutes)} past {english(hour)}",
            f"um {german(minutes)} nach {german(hour)}",
        )
    if kind == 2:
        return (
            f"at {english(minutes)} to {english(hour)}",
            f"um {german(minutes)} vor {german(hour)}",
        )
    return f"at {english(hour)} o'clock", f"um {german(hour)} Uhr"


def _date(draw: random.Random) -> tuple[str, str]:
    day, month, year = draw.randrange(1, 29), draw.randrange(12), draw.randrange(13, 100)
    ordinal = _EN_ORDINALS[day - 1] if day <= 20 else f"twenty-{_EN_ORDINALS[day - 21]}"
    ending = _DE_ORDINALS[day - 1] if day <= 8 else f"{german(day)}{'ten' if day < 20 else 'sten'}"
    return (
        f"on the {ordinal} of {_EN_MONTHS[month]} nineteen {english(year)}",
        f"am {ending} {_DE_MONTHS[month]} neunzehnhundert{german(year)}",
    )


def _sum(draw: random.Random) -> tuple[str, str]:
    left, right = draw.randrange(2, 100), draw.randrange(2, 100)
    return (
        f"{english(left)} plus {english(right)} is {english(left + right)}",
        f"{german(left)} plus {german(right)} ist {german(left + right)}",
    )


def phrases(count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` different pairs (English, German), in an order that ``seed`` decides."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        source, target = draw.choice((_number, _price, _time, _date, _sum))(draw)
        found.setdefault(source, target)
    return list(found.items())
