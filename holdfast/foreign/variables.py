"""Whole numbers in name maps: variables, arithmetic on them, and sizes of tensors.

num_heads                                           a variable
num_heads // num_kv_heads + 2                       + - * // and parentheses
size('model.layers.{i:int}.self_attn.o_proj.weight', 1)     of the first tensor that matches
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence

from holdfast.errors import ConfigError
from holdfast.foreign.patterns import NamePattern
from holdfast.foreign.tensor_expressions import dim_of

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors that a map is applied to, by name."""
Value = int | str | Sequence[int | str] | None
"""What a map states for a variable: a number, an expression, or several of which the first counts
whose tensors there are; None must be set by the caller."""

_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


class _NoValueError(Exception):
    """A size is of a tensor that is not there, or a variable has no value."""


class Variables:
    """The variables of a map, evaluated on the tensors that it is applied to.

    Args:
        given: What the map, or the caller, states for each variable.
        shapes: Of the tensors.
    """

    def __init__(self, given: Mapping[str, Value], shapes: Shapes) -> None:
        self._given = given
        self._shapes = shapes
        self._known: dict[str, int] = {}
        self._open: list[str] = []

    def evaluate(self, expression: int | str, *, place: str) -> int:
        """Return the value of an expression.

        Raises:
            ConfigError: It is malformed, or a variable in it has no value; the message names
                `place`.
        """
        try:
            return self._option(expression)
        except _NoValueError as error:
            raise ConfigError(f"{place}: {expression!r}: {error}") from None
        except ZeroDivisionError:
            raise ConfigError(f"{place}: {expression!r} divides by 0") from None
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None

    def _value(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name):
                return self._variable(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return int(_OPERATIONS[type(op)](self._value(left), self._value(right)))
            case ast.Call(
                func=ast.Name(id="size"),
                args=[ast.Constant(value=str() as pattern), dim],
                keywords=[],
            ):
                return self._size(pattern, self._value(dim))
            case _:
                raise ConfigError(
                    f"{ast.unparse(node)!r} is not allowed: there are variables, whole numbers, "
                    f"+ - * // and size('name', dim)"
                )

    def _size(self, text: str, dim: int) -> int:
        pattern = NamePattern(text)
        name = next((name for name in self._shapes if pattern.match(name) is not None), None)
        if name is None:
            raise _NoValueError(f"no tensor is named {text!r}")
        shape = self._shapes[name]
        return shape[dim_of(dim, len(shape))]

    def _variable(self, name: str) -> int:
        if name not in self._known:
            if name not in self._given:
                known = ", ".join(self._given) or "none"
                raise ConfigError(f"there is no variable {name!r}; known: {known}")
            if name in self._open:
                raise ConfigError(f"variable {name!r} is stated in terms of itself")
            self._open.append(name)
            try:
                self._known[name] = self._first(name, self._given[name])
            finally:
                self._open.pop()
        return self._known[name]

    def _first(self, name: str, given: Value) -> int:
        """Return the first of several values whose tensors there are."""
        if given is None:
            raise _NoValueError(
                f"variable {name!r} has no value: pass variables={{{name!r}: …}}, or --set {name}=…"
            )
        options = [given] if isinstance(given, int | str) else given
        reasons = []
        for option in options:
            try:
                return self._option(option)
            except _NoValueError as error:
                reasons.append(str(error))
        raise _NoValueError(f"variable {name!r} has no value: {'; '.join(reasons)}")

    def _option(self, option: int | str) -> int:
        """Return the value of an expression; an error if a tensor of it is absent."""
        if isinstance(option, int):
            return option
        try:
            return self._value(ast.parse(option, mode="eval").body)
        except SyntaxError:
            raise ConfigError(f"{option!r} is not an expression") from None
