"""Which stored dtypes a load with `cast=True` converts into which; nothing is lost by accident.

| stored | goes into |
|---|---|
| a float | any float, but `F8_E8M0`, which holds powers of two alone; any complex type |
| a complex number | any complex type |
| an integer | any integer, float or complex type that has every value of it exactly |
| a truth value | any type, but `F8_E8M0`, which has no zero |

Everything else loses what the stored type is for: imaginary parts, fractions, high digits, signs.
"""

from __future__ import annotations

from types import MappingProxyType

_FLOAT_DIGITS = MappingProxyType(
    {
        "F64": 53, "F32": 24, "F16": 11, "BF16": 8, "F8_E4M3": 4, "F8_E4M3FNUZ": 4,
        "F8_E5M2": 3, "F8_E5M2FNUZ": 3, "F8_E8M0": 1,
    }
)  # fmt: skip
"""Binary digits of the significand: integers of so many bits are exact."""
_COMPONENT = MappingProxyType({"C32": "F16", "C64": "F32", "C128": "F64"})


def refused_cast(stored: str, target: str) -> str:
    """Why elements of one dtype are not converted into another, in words; empty where they are."""
    if stored == target:
        return ""
    if stored == "BOOL":
        return "F8_E8M0 has no zero" if target == "F8_E8M0" else ""
    if stored in _COMPONENT:
        return "" if target in _COMPONENT else f"{target} has no imaginary part"
    into = _COMPONENT.get(target, target)
    if stored in _FLOAT_DIGITS:
        if into not in _FLOAT_DIGITS:
            return f"{target} has no fractions"
        return f"{target} holds powers of two alone" if into == "F8_E8M0" else ""
    if into == "BOOL":
        return "BOOL tells zero from the rest alone"
    signed, bits = stored[0] == "I", int(stored[1:])
    digits = bits - signed
    if into in _FLOAT_DIGITS:
        fits = digits <= _FLOAT_DIGITS[into] and into != "F8_E8M0"
        return "" if fits else f"{target} has not every {stored} exactly"
    if signed and into[0] == "U":
        return f"{target} has no negative numbers"
    room = int(into[1:]) - (into[0] == "I")
    return "" if digits <= room else f"{target} is too small for some {stored}"
