"""Names of units, so that `cm`, `centimeters` and no unit agree and `cm` and `m` do not. No unit is ever converted."""

from __future__ import annotations

import re
from functools import lru_cache

_SPELLINGS = """
m meter metre, cm centimeter centimetre, mm millimeter millimetre, km kilometer kilometre, um micrometer micron, nm nanometer
in inch inches, ft foot feet, yd yard, mi mile, au, pc parsec, kpc, mpc, ly lightyear, angstrom
s sec second, min minute, h hr hour, day, week wk, month, yr year, ms millisecond, am, pm
g gm gram, kg kilogram, mg milligram, lb pound, oz ounce, ton, tonne
l liter litre, ml milliliter millilitre, gal gallon, quart, pint, cup
dollar usd buck, cent penny, euro eur, rupee, yuan, yen
degree deg degrees, radian rad, arcsecond arcsec, arcminute arcmin, degreec celsius, degreef fahrenheit, k kelvin
hz hertz, khz, mhz, ghz, j joule, kj, cal calorie, kcal, w watt, kw, n newton, pa pascal, kpa, atm, bar, ev, kev, mev, erg
mol mole, amu, c coulomb, v volt, ohm, kohm, t tesla, f farad, dyne dyn, acre, hectare ha, unit
"""
_CANONICAL = {spelling: names.split()[0] for names in re.split(r"[,\n]", _SPELLINGS) if names.strip() for spelling in names.split()}
_COMPOSITE = {"mph": "mile/hour", "kmph": "km/hour", "kmh": "km/hour", "kph": "km/hour"}
UNWRAPPED_UNITS = frozenset(
    word
    for spelling in [*_CANONICAL, *_COMPOSITE]
    if len(spelling) > 1 and spelling not in ("in", "au", "pc", "am", "pm", "ms", "ha", "ev", "pa")
    for word in (spelling, spelling + "s", spelling.capitalize(), spelling.upper())
) | {"eV"}
"""Units that are recognised after a number without a text command. Single letters are variables there (`6m` is 6·m)."""
_ANY = "unit"


@lru_cache(maxsize=4096)
def canonical_unit(text: str) -> str:
    """One spelling for a known unit with its powers, such as `cm^2` or `km hour^-1`; empty for anything else."""
    flat = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).casefold().replace("\\cdot", " ").replace("\\", " ")
    flat = re.sub(r"\b([ap])\.\s*m\.?", r"\1m", flat).replace(".", " ")
    flat = re.sub(r"\b\w+\b", lambda word: _COMPOSITE.get(word[0], word[0]), flat)
    flat = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1 ", flat)
    powers: dict[str, int] = {}
    factor, sign = 1, 1
    for word in re.findall(r"[^\s/]+|/", flat):
        if word in ("per", "/"):
            sign = -1
        elif word in ("square", "sq", "cubic", "cu"):
            factor = 2 if word.startswith("s") else 3
        elif word in ("squared", "cubed") and powers:
            powers[next(reversed(powers))] *= 2 if word == "squared" else 3
        else:
            name, _, power = word.partition("^")
            name = _CANONICAL.get(name) or _CANONICAL.get(name.removesuffix("s")) or ""
            if not name:
                return ""
            powers[name] = powers.get(name, 0) + sign * factor * int(power or 1)
            factor = 1
    return " ".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()))


def units_differ(one: str, other: str) -> bool:
    """Whether both are known units and not the same; unknown words (`18 apples`) and `units` agree with everything."""
    left, right = canonical_unit(one), canonical_unit(other)
    if "degree" in (left, right) and {left, right} <= {"degree", "c degree", "degree f", "degreec", "degreef"}:
        return False  # degrees of what is left open
    return bool(left and right and left != right and _ANY not in (left.split("^")[0], right.split("^")[0]))
