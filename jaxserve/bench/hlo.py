"""Reads the text of a compiled program (scheduled HLO): which kernels run, what they copy, and the bytes and operations of a run.

Text in, numbers out; knows neither JAX nor our models. Bytes are those that kernels load from and store to device memory if each operand is
read once and nothing stays in a cache: a fusion that slices, gathers, scatters or updates in place counts the places it touches, not the
whole array. What a custom call touches is not in the text: the caller says it. Operations are those of dot products. Next:
`bench.roofline`, which puts the counts beside what a card can do; `tests/deviceless`, which look for copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "c64": 64, "token": 0, "opaque": 0,
}  # fmt: skip
NO_KERNEL = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "optimization-barrier", "partition-id", "replica-id",
    "copy-done", "all-reduce-done", "all-gather-done", "collective-permute-done", "async-done", "async-update",
))  # fmt: skip
"""They move nothing, or their other half was counted."""
COPIES = frozenset(("copy", "copy-start", "convert", "transpose", "reshape", "slice", "dynamic-slice"))
"""They give what they were given, in another place, order or dtype, or a piece of it."""
COLLECTIVES = frozenset(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"))
SLICES = frozenset(("slice", "dynamic-slice", "gather"))
ELEMENTS_OF_ELEMENTS = frozenset(("bitcast", "copy", "convert", "reduce"))
"""Each element that they give takes one of their first operand, or equally many; those of no other element."""
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\]")
_HEAD = re.compile(r"(?:ENTRY )?%([^ ]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([^ ]+) = ")
_NAME = re.compile(r"%([^\s,()]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%([^\s,}]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Shape(NamedTuple):
    """An array's dtype as HLO calls it, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return math.prod(self.dims) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: `name = shapes opcode(arguments), attributes`. A tuple has several shapes, flattened.

    `operands` are the names among the arguments; those of a parameter or constant are its number or value.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.num_bytes for shape in self.shapes)

    @property
    def num_elements(self) -> int:
        """Of the result, or of its first part."""
        return math.prod(self.shapes[0].dims)

    def called(self) -> str | None:
        """The computation of a fusion or call."""
        match = _CALLED.search(self.attributes)
        return match[1] if match else None

    def attribute(self, name: str) -> str:
        """The value of an attribute that is one word or in braces; empty where there is none."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|\"[^\"]*\"|[^,\s]+)", self.attributes)
        return match[1].strip('{}"') if match else ""

    def payload(self, name: str) -> bytes:
        """A string of a custom call's `backend_config`, as the bytes that it stands for."""
        match = re.search(rf'\b{name} = "((?:[^"\\]|\\.)*)"', self.attributes)
        if match is None:
            return b""
        text = match[1].encode("latin-1")
        return re.sub(rb'\\([0-9A-Fa-f]{2}|["\\])', lambda m: m[1] if len(m[1]) == 1 else bytes([int(m[1], 16)]), text)

    def numbers(self, name: str) -> tuple[int, ...]:
        """The value of an attribute that is a list of numbers."""
        return tuple(map(int, filter(None, self.attribute(name).split(","))))


Computation = dict[str, Instruction]


class Cost(NamedTuple):
    """What a run moves to and from device memory, and computes in dot products."""

    num_bytes: float = 0.0
    num_operations: float = 0.0

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        """This, and `times` the other."""
        return Cost(self.num_bytes + times * other.num_bytes, self.num_operations + times * other.num_operations)


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, in order, and which one runs."""

    computations: dict[str, Computation] = field(repr=False)
    entry: str

    def everything(self) -> Iterator[Instruction]:
        """Every instruction, also those inside fusions."""
        for computation in self.computations.values():
            yield from computation.values()

    def launched(self, name: str | None = None) -> Iterator[tuple[str, Instruction]]:
        """Instructions that run as they stand, each with its computation; those of loops and branches once, none from inside fusions."""
        where = name or self.entry
        for instruction in self.computations[where].values():
            yield where, instruction
            for inner in _bodies(instruction):
                yield from self.launched(inner)

    def custom_calls(self) -> list[Instruction]:
        """Calls of kernels that XLA did not write, those of loops and branches once."""
        return [i for _, i in self.launched() if i.opcode == "custom-call"]

    def collectives(self) -> list[Instruction]:
        """What devices tell each other, likewise."""
        return [i for _, i in self.launched() if i.opcode.removesuffix("-start") in COLLECTIVES]

    def copies(self, min_bytes: int) -> list[tuple[Instruction, int]]:
        """Launches that write a copy of one of the program's parameters, or of a large piece of one, to memory; and its number.

        What a fusion only converts on its way into a product is not written and does not count.
        """
        found = []
        for where, instruction in self.launched():
            if instruction.num_bytes >= min_bytes and instruction.opcode in COPIES | {"fusion"}:
                called = instruction.called() if instruction.opcode == "fusion" else None
                roots = [(where, instruction)] if called is None else [(called, r) for r in self._written(called)]
                for inside, root in roots:
                    if root.opcode in COPIES and root.num_bytes >= min_bytes:
                        origin = self.origin(inside, root.name)
                        found += [(instruction, origin)] if origin is not None else []
        return found

    def gathered(self) -> Iterator[tuple[Instruction, int | None]]:
        """Every gather, also in fusions, and the number of the parameter that it reads (None for an array that was computed)."""
        for where, computation in self.computations.items():
            for instruction in computation.values():
                if instruction.opcode == "gather":
                    yield instruction, self.origin(where, instruction.operands[0])

    def origin(self, where: str, name: str) -> int | None:
        """The number of the program's parameter that a value in computation `where` is, or is a copy of; None if it was computed."""
        instruction = self.computations[where].get(name)
        if instruction is None:
            return None
        if instruction.opcode == "parameter":
            return int(instruction.arguments) if where == self.entry else self._outside(where, instruction)
        if instruction.opcode == "get-tuple-element":
            source = self.computations[where][instruction.operands[0]]
            index = int(instruction.attribute("index"))
            if source.opcode == "parameter" and where != self.entry:
                return self._outside(where, source, index)
            if source.opcode == "while":
                source = self.computations[where][source.operands[0]]
            if source.opcode == "tuple":
                return self.origin(where, source.operands[index])
            return None
        if instruction.opcode in COPIES | {"bitcast", "optimization-barrier", "copy-done"}:
            return self.origin(where, instruction.operands[0])
        return None

    def _outside(self, where: str, parameter: Instruction, index: int | None = None) -> int | None:
        """The origin of a computation's parameter, or of one element where it is a tuple, at the place that runs it."""
        if where not in self._callers:
            return None
        caller, site = self._callers[where]
        if site.opcode == "conditional":
            operand = site.operands[1 + _bodies(site).index(where)]
        elif site.opcode == "while":
            operand = site.operands[0]
        else:
            operand = site.operands[int(parameter.arguments)]
        if index is not None:
            outer = self.computations[caller][operand]
            if outer.opcode == "tuple":
                return self.origin(caller, outer.operands[index])
            if outer.opcode == "parameter" and caller != self.entry:
                return self._outside(caller, outer, index)
            return None
        return self.origin(caller, operand)

    @cached_property
    def _callers(self) -> dict[str, tuple[str, Instruction]]:
        """For each computation of a fusion, loop, branch or call: where it is run from."""
        found = {}
        for where, computation in self.computations.items():
            for instruction in computation.values():
                inner = [instruction.called()] if instruction.opcode == "fusion" else _bodies(instruction)
                found.update({name: (where, instruction) for name in inner if name})
        return found

    def _written(self, called: str) -> list[Instruction]:
        """The results of a fusion."""
        root = self._roots[called]
        body = self.computations[called]
        results = [body[o] for o in root.operands] if root.opcode == "tuple" else [root]
        while any(r.opcode == "bitcast" for r in results):
            results = [body[r.operands[0]] if r.opcode == "bitcast" else r for r in results]
        return results

    @cached_property
    def _roots(self) -> dict[str, Instruction]:
        return {name: next(i for i in body.values() if i.is_root) for name, body in self.computations.items()}

    def cost(
        self,
        *,
        custom_call: Callable[[Instruction], Cost | None] = lambda _: None,
        trips: Callable[[Instruction], float] | None = None,
        branch: Callable[[Sequence[Cost]], Cost] = min,
        name: str | None = None,
    ) -> Cost:
        """What a run costs.

        Args:
            custom_call: The cost of a custom call; None counts operands and results once.
            trips: How often a loop runs whose number of turns the text does not know.
            branch: Picks among the costs of a conditional's branches.
            name: The computation; None is the program.

        Raises:
            ValueError: a loop of an unknown number of turns, and no `trips`.
        """
        options = {"custom_call": custom_call, "trips": trips, "branch": branch}
        computation = self.computations[name or self.entry]
        total = Cost()
        for instruction in computation.values():
            match instruction.opcode:
                case "while":
                    known = _TRIPS.search(instruction.attributes)
                    if known is None and trips is None:
                        raise ValueError(f"nobody says how often {instruction.name} runs")
                    turns = float(known[1]) if known else trips(instruction)  # type: ignore[misc]
                    total = total.plus(self.cost(name=instruction.attribute("body").lstrip("%"), **options), turns)  # type: ignore[arg-type]
                case "conditional":
                    total = total.plus(branch([self.cost(name=b, **options) for b in _bodies(instruction)]))  # type: ignore[arg-type]
                case "call":
                    total = total.plus(self.cost(name=instruction.called(), **options))  # type: ignore[arg-type]
                case "custom-call":
                    total = total.plus(custom_call(instruction) or self._custom_cost(computation, instruction))
                case opcode if opcode not in NO_KERNEL:
                    total = total.plus(self._kernel_cost(computation, instruction))
        return total

    def _custom_cost(self, computation: Computation, instruction: Instruction) -> Cost:
        num_bytes = instruction.num_bytes + sum(computation[o].num_bytes for o in instruction.operands)
        if "gemm" not in instruction.attribute("custom_call_target") and "matmul" not in instruction.attribute("custom_call_target"):
            return Cost(num_bytes)
        contracted = [int(n) for n in re.findall(r'"lhs_contracting_dimensions":\["(\d+)"', instruction.attributes)]
        lhs = computation[instruction.operands[0]].shapes[0].dims
        return Cost(num_bytes, 2 * math.prod(instruction.shapes[0].dims) * math.prod(lhs[i] for i in contracted))

    def _kernel_cost(self, computation: Computation, instruction: Instruction) -> Cost:
        """One launch: a fusion, or an instruction that stands alone."""
        called = instruction.called() if instruction.opcode == "fusion" else None
        if called is None:
            body = {o: computation[o] for o in instruction.operands} | {instruction.name: instruction}
            inputs: list[str] = list(dict.fromkeys(instruction.operands))
            root = instruction
        else:
            body, root = self.computations[called], self._roots[called]
            inputs = [i.name for i in body.values() if i.opcode == "parameter"]
        users: dict[str, list[Instruction]] = {}
        for inner in body.values():
            for operand in inner.operands if inner.opcode != "parameter" and (called or inner is instruction) else ():
                users.setdefault(operand, []).append(inner)
        num_bytes = sum(_bytes_read(body, users, name) for name in inputs) + _bytes_written(body, root)
        return Cost(num_bytes, sum(_dot_operations(body, i) for i in body.values() if i.opcode == "dot"))


def parse(text: str) -> Module:
    """The program of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry = ""
    for line in text.splitlines():
        if line.endswith("{") and (head := _HEAD.match(line)):
            current = computations[head[1]] = {}
            entry = head[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            current[match[2]] = _instruction(line[match.end() :], match[2], is_root=bool(match[1]))
    assert entry, "this is no HLO module"
    return Module(computations, entry)


def _instruction(rest: str, name: str, *, is_root: bool) -> Instruction:
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[type_end:].strip().partition("(")
    end = _closing("(" + tail, 0) - 1
    shapes = tuple(Shape(d, tuple(map(int, filter(None, dims.split(","))))) for d, dims in _SHAPE.findall(rest[:type_end]))
    return Instruction(name, opcode, shapes, tuple(_NAME.findall(tail[:end])), tail[:end], tail[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at `start` is closed."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise AssertionError(text[:200])


def _bodies(instruction: Instruction) -> list[str]:
    """The computations that an instruction runs as they stand."""
    match instruction.opcode:
        case "while":
            return [instruction.attribute("body").lstrip("%")]
        case "conditional":
            names = instruction.attribute("branch_computations") or ",".join(
                (instruction.attribute("true_computation"), instruction.attribute("false_computation"))
            )
            return [name.strip().lstrip("%") for name in names.split(",")]
        case "call":
            called = instruction.called()
            return [called] if called else []
    return []


def _bytes_read(body: Computation, users: dict[str, list[Instruction]], name: str) -> int:
    """Of one input: all of it, unless every use takes only a piece, or writes a piece in place."""
    if name not in users:
        return 0
    value = body[name]
    return _elements_read(body, users, name) * value.num_bytes // value.num_elements if len(value.shapes) == 1 else value.num_bytes


def _elements_read(body: Computation, users: dict[str, list[Instruction]], name: str) -> int:
    """How many elements of a value inside a kernel are used: kernels compute, and load for it, no others. A result is used whole."""
    size, taken = body[name].num_elements, 0
    for user in users.get(name, []):
        is_first = user.operands[0] == name
        if user.opcode in SLICES and is_first:
            taken += _elements_read(body, users, user.name)
        elif user.opcode in ELEMENTS_OF_ELEMENTS and is_first:
            taken += _elements_read(body, users, user.name) * size // user.num_elements
        elif not (user.opcode in ("dynamic-update-slice", "scatter") and is_first):
            return size
    return min(taken, size) if name in users else size  # what nothing uses is a result


def _bytes_written(body: Computation, root: Instruction) -> int:
    """Of the result: all of it, unless it is an input written in place."""
    match root.opcode:
        case "tuple":
            return sum(_bytes_written(body, body[o]) if o in body else 0 for o in root.operands)
        case "bitcast" if root.operands[0] in body:
            return _bytes_written(body, body[root.operands[0]])
        case "dynamic-update-slice":
            return body[root.operands[1]].num_bytes
        case "scatter":
            return body[root.operands[-1]].num_bytes
        case "parameter":
            return 0
    return root.num_bytes


def _dot_operations(body: Computation, dot: Instruction) -> int:
    lhs = body[dot.operands[0]].shapes[0].dims
    return 2 * math.prod(dot.shapes[0].dims) * math.prod(lhs[i] for i in dot.numbers("lhs_contracting_dims"))
