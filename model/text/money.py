"""Amounts of money."""

import re
from typing import NamedTuple

from model.text.numbers import cardinal, is_one, number
from model.text.rules import NUMBER, any_of, is_adjective, rule
from model.text.spelled import spell


class Currency(NamedTuple):
    one: str
    many: str
    cent: str = ""
    cents: str = ""


_DOLLAR = Currency("dollar", "dollars", "cent", "cents")
_POUND = Currency("pound", "pounds", "penny", "pence")
_EURO = Currency("euro", "euros", "cent", "cents")
_YEN = Currency("yen", "yen")


def _dollars_of(country: str) -> Currency:
    name = spell(country) if country.isupper() else country
    return Currency(f"{name} dollar", f"{name} dollars", "cent", "cents")


CURRENCIES = {
    "$": _DOLLAR,
    "US$": _dollars_of("US"),
    "CA$": _dollars_of("Canadian"),
    "C$": _dollars_of("Canadian"),
    "A$": _dollars_of("Australian"),
    "AU$": _dollars_of("Australian"),
    "NZ$": _dollars_of("New Zealand"),
    "HK$": _dollars_of("Hong Kong"),
    "£": _POUND,
    "€": _EURO,
    "¥": _YEN,
    "₹": Currency("rupee", "rupees", "paisa", "paise"),
    "₩": Currency("won", "won"),
    "₽": Currency("ruble", "rubles", "kopeck", "kopecks"),
    "₺": Currency("lira", "lira"),
    "₴": Currency("hryvnia", "hryvnias"),
    "₪": Currency("shekel", "shekels"),
    "₫": Currency("dong", "dong"),
    "₱": Currency("peso", "pesos"),
    "₦": Currency("naira", "naira"),
    "₿": Currency("bitcoin", "bitcoins"),
    "R$": Currency("real", "reais", "centavo", "centavos"),
}
CODES = {
    "USD": _dollars_of("US"),
    "CAD": _dollars_of("Canadian"),
    "AUD": _dollars_of("Australian"),
    "GBP": _POUND,
    "EUR": _EURO,
    "JPY": _YEN,
    "CNY": Currency("yuan", "yuan"),
    "INR": CURRENCIES["₹"],
    "CHF": Currency("Swiss franc", "Swiss francs"),
    "BTC": CURRENCIES["₿"],
}
MAGNITUDES = {
    "k": "thousand", "K": "thousand", "m": "million", "M": "million", "mm": "million",
    "MM": "million", "mn": "million", "b": "billion", "B": "billion", "bn": "billion",
    "Bn": "billion", "t": "trillion", "T": "trillion", "tn": "trillion",
}  # fmt: skip
_WORDS = ("hundred", "thousand", "million", "billion", "trillion", "quadrillion")
_SIGN = any_of(CURRENCIES)
_CODE = any_of(CODES)
_MAGNITUDE = rf"(?:(?P<short>{any_of(MAGNITUDES)})(?![A-Za-z])|[ -](?P<word>{any_of(_WORDS)})\b)"
_AMOUNT = rf"(?P<amount>{NUMBER})"


def _magnitude(match: re.Match[str]) -> str:
    return str(MAGNITUDES[match["short"]] if match["short"] else match["word"] or "")


def amount(text: str, currency: Currency, magnitude: str = "") -> str:
    """One amount; two decimals are cents where the currency has them."""
    if magnitude:
        return f"{number(text)} {magnitude} {currency.many}"
    before, _, after = text.partition(".")
    units = before.replace(",", "") or "0"
    if len(after) > 2 or (after and not currency.cent):
        return f"{number(text)} {currency.many}"
    cents = int(after.ljust(2, "0")) if after else 0
    large = f"{number(units)} {currency.one if is_one(units) else currency.many}"
    if not cents:
        return large
    small = f"{cardinal(cents)} {currency.cent if cents == 1 else currency.cents}"
    return small if int(units[:12]) == 0 else f"{large} and {small}"


def _sign_first(match: re.Match[str]) -> str:
    minus = "minus " if match["minus"] or match["inner"] else ""
    currency = CURRENCIES[match["sign"]]
    if is_adjective(match):
        currency = currency._replace(many=currency.one, cents=currency.cent)
    return minus + amount(match["amount"], currency, _magnitude(match))


def _sign_last(match: re.Match[str]) -> str:
    return amount(match["amount"], CURRENCIES[match["sign"]])


def _with_code(match: re.Match[str]) -> str:
    return amount(match["amount"], CODES[match["code"]], _magnitude(match))


def _range(match: re.Match[str]) -> str:
    currency, magnitude = CURRENCIES[match["sign"]], _magnitude(match)
    return f"{number(match['low'])} to {amount(match['amount'], currency, magnitude)}"


def _cents(match: re.Match[str]) -> str:
    return f"{number(match['amount'])} {'cent' if is_one(match['amount']) else 'cents'}"


def _adjective(match: re.Match[str]) -> str:
    """In "a $5 bill" the unit stays singular."""
    return f"{number(match['amount'])} {CURRENCIES[match['sign']].one} {match['thing']}"


MONEY_RULES = (
    rule(
        rf"(?P<sign>{_SIGN})(?P<amount>\d+)[- ](?P<thing>bill|coin|note|gift card|coupon|voucher"
        r"|menu|minimum|fee|credit|discount|refund|deposit|tip|fine)\b(?!s)",
        _adjective,
    ),
    rule(rf"(?P<sign>{_SIGN})(?P<low>{NUMBER}) ?[-–—] ?(?:{_SIGN})?{_AMOUNT}{_MAGNITUDE}?", _range),
    rule(
        rf"(?P<minus>(?<![\w.)])[-−] ?)?(?P<sign>{_SIGN})(?P<inner>[-−])? ?{_AMOUNT}{_MAGNITUDE}?",
        _sign_first,
    ),
    rule(rf"{_AMOUNT} ?(?P<sign>[€£¥₹₽₩])(?!\d)", _sign_last),
    rule(rf"(?P<code>{_CODE}) ?{_AMOUNT}{_MAGNITUDE}?(?![\w%])", _with_code),
    rule(rf"{_AMOUNT}{_MAGNITUDE}? ?(?P<code>{_CODE})(?!\w)", _with_code),
    rule(rf"{_AMOUNT} ?¢", _cents),
)
