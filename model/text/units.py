"""Measures: numbers with a unit, percentages, temperatures, feet and inches, sizes."""

import re
from typing import NamedTuple

from model.text.money import MAGNITUDES
from model.text.numbers import is_one, number
from model.text.rules import NUMBER, any_of, ends_sentence, is_adjective, rule
from model.text.spelled import spell


class Unit(NamedTuple):
    one: str
    many: str


def _units(table: str) -> dict[str, Unit]:
    """Lines of "abbreviations: singular/plural"."""
    units = {}
    for line in table.strip().splitlines():
        names, _, spoken = line.partition(": ")
        one, _, many = spoken.partition("/")
        for name in names.split():
            units[name] = Unit(one, many or one + "s")
    return units


UNITS = _units("""
km: kilometer
m: meter
cm: centimeter
mm: millimeter
µm μm um: micrometer
nm: nanometer
mi: mile
ft ft.: foot/feet
yd yds yd.: yard
kg kgs: kilogram
g: gram
mg: milligram
µg μg mcg: microgram
lb lbs lb. lbs.: pound
oz oz.: ounce
L l: liter
mL ml: milliliter
cl: centiliter
gal gal.: gallon
tsp tsp.: teaspoon
tbsp tbsp.: tablespoon
mph: mile per hour/miles per hour
kph km/h kmh: kilometer per hour/kilometers per hour
m/s: meter per second/meters per second
mpg: mile per gallon/miles per gallon
°C ℃: degree Celsius/degrees Celsius
°F ℉: degree Fahrenheit/degrees Fahrenheit
°: degree/degrees
kW: kilowatt
MW: megawatt
kWh: kilowatt hour/kilowatt hours
W: watt
V: volt
mAh: milliamp hour/milliamp hours
Hz: hertz/hertz
kHz: kilohertz/kilohertz
MHz: megahertz/megahertz
GHz: gigahertz/gigahertz
KB kB: kilobyte
MB: megabyte
GB: gigabyte
TB: terabyte
kbps Kbps kbit/s: kilobit per second/kilobits per second
Mbps Mbit/s: megabit per second/megabits per second
Gbps Gbit/s: gigabit per second/gigabits per second
MB/s: megabyte per second/megabytes per second
GB/s: gigabyte per second/gigabytes per second
µs μs us: microsecond
ms: millisecond
sec secs sec. s: second
min mins min.: minute
hr hrs hr. hrs. h: hour
yr yrs yr. yrs.: year
wk wks: week
sq. ft. sqft ft^2: square foot/square feet
m^2 sqm: square meter
km^2: square kilometer
cm^2: square centimeter
m^3: cubic meter
cm^3: cubic centimeter
dB: decibel
kcal: kilocalorie
cal: calorie
px: pixel
fps: frame per second/frames per second
""")
UNITS |= {
    "sq ft": UNITS["sqft"], "sq. ft.": UNITS["sqft"], "sq. ft": UNITS["sqft"],
    "sq mi": Unit("square mile", "square miles"), "fl oz": Unit("fluid ounce", "fluid ounces"),
    "psi": Unit(spell("PSI"), spell("PSI")), "rpm": Unit(spell("RPM"), spell("RPM")),
    "bpm": Unit(spell("BPM"), spell("BPM")), "ppm": Unit(*["parts per million"] * 2),
}  # fmt: skip
_PER = {
    "month": "month", "mo": "month", "mo.": "month", "year": "year", "yr": "year", "day": "day",
    "week": "week", "wk": "week", "hour": "hour", "hr": "hour", "h": "hour", "min": "minute",
    "minute": "minute", "sec": "second", "s": "second", "second": "second", "person": "person",
    "night": "night", "user": "user", "lb": "pound", "kg": "kilogram", "mile": "mile",
    "gal": "gallon", "gallon": "gallon", "seat": "seat", "unit": "unit", "km": "kilometer",
}  # fmt: skip
_UNIT = any_of(UNITS)
_AMOUNT = rf"(?<![\w.,])(?P<amount>{NUMBER})"


def _measure(match: re.Match[str]) -> str:
    unit = UNITS[match["unit"]]
    single = is_one(match["amount"]) or match["hyphen"] == "-" or is_adjective(match)
    stop = "." if match["unit"].endswith(".") and ends_sentence(match) else ""
    return f"{number(match['amount'])} {unit.one if single else unit.many}{stop}"


def _feet_inches(match: re.Match[str]) -> str:
    return f"{number(match['feet'])} foot {number(match['inches'])}"


def _inches(match: re.Match[str]) -> str:
    """A double quote after a number is inches, unless it closes a quotation."""
    before = match.string[: match.start()]
    if before.count('"') % 2:
        return match[0]
    noun = re.match(r" [a-z]", match.string[match.end() :]) is not None
    single = noun or is_one(match["amount"])
    return f"{number(match['amount'])} {'inch' if single else 'inches'}"


def _magnitude(match: re.Match[str]) -> str:
    return f"{number(match['amount'])} {MAGNITUDES[match['short']]}"


def _temperature(match: re.Match[str]) -> str:
    unit = UNITS["°" + match["scale"]]
    return f"{number(match['amount'])} {unit.one if is_one(match['amount']) else unit.many}"


def _per(match: re.Match[str]) -> str:
    stop = "." if match["unit"].endswith(".") and ends_sentence(match) else ""
    return f" per {_PER[match['unit']]}{stop}"


UNIT_RULES = (
    rule(rf"(?<![\w.])[-−–](?={NUMBER})", "minus "),
    rule(
        r"(?<![\w.,])(?P<feet>\d{1,3})['′’] ?(?P<inches>\d{1,2}(?:\.\d)?)(?:\"|″|”|''|’’)",
        _feet_inches,
    ),
    rule(rf"{_AMOUNT}(?:\"|″)(?!\w)", _inches),
    rule(rf"{_AMOUNT}[′](?!\w)", lambda m: f"{number(m['amount'])} feet"),
    rule(rf"{_AMOUNT} ?in\.(?!\w)", lambda m: f"{number(m['amount'])} inches"),
    rule(rf"{_AMOUNT}in(?!\w)", lambda m: f"{number(m['amount'])} inches"),
    rule(r"(?<=\d)(%|°|°[CF])? ?[-–—] ?(?=\d+(?:\.\d+)?(?:%|°))", r"\1 to "),
    rule(r"(\d)%(?= to \d[\d.,]*%)", r"\1"),
    rule(rf"{_AMOUNT} ?%", lambda m: f"{number(m['amount'])} percent"),
    rule(rf"{_AMOUNT} ?‰", lambda m: f"{number(m['amount'])} per mille"),
    rule(rf"{_AMOUNT} ?(?:º|°) ?(?P<scale>[CF])(?!\w)", _temperature),
    rule(rf"{_AMOUNT}(?P<hyphen>[ -]?)(?P<unit>{_UNIT})(?![\w²³])(?!\.\w)(?!'\w)", _measure),
    rule(rf"(?<=[A-Za-z])/(?P<unit>{any_of(_PER)})(?!\w)", _per),
    rule(rf"{_AMOUNT}(?P<short>k|M|bn|tn)(?!\w|['-]\w)", _magnitude),
    rule(
        r"(?<![\w.,])(\d+(?:\.\d+)?)(?: ?[x×] ?)(?=\d+(?:\.\d+)?(?![\w]))",
        r"\1 by ",
    ),
    rule(rf"{_AMOUNT} ?[x×](?!\w)", lambda m: f"{number(m['amount'])} times"),
    rule(rf"{_AMOUNT}\+(?! ?\d)", lambda m: f"{number(m['amount'])} plus"),
)
