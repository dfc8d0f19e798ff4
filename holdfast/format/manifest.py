"""The manifest: the commit record of a checkpoint.

The file is compact JSON whose last member is `digest`. The digest covers every byte before
`,"digest":"<32 hexadecimal digits>"}` and a newline. So every byte of the file is covered, and a
check needs no canonical form of JSON.

An entry of `tensors` is an array, and keys that the tree implies are left out; see
`without_implied_keys`. The user's own JSON object is kept in `parts` under a name that a part
cannot have. A reader that does not know it sees one more tree of plain values, and the digest
covers it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from holdfast.arrays.box_table import pad_shapes
from holdfast.arrays.types import IntArray
from holdfast.decoding import convert_as, decode_json_as
from holdfast.errors import ConfigError, CorruptionError, HoldfastError, PlanError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import OTHER_FILES, data_file
from holdfast.format.values import (
    Node,
    decode_tree,
    encode_tree,
    fill_implied_keys,
    is_plain_dict,
    tag_of,
    without_implied_keys,
)

T = TypeVar("T")

FORMAT = "holdfast"
VERSION = 1
"""The version that is written, and the only one so far."""
MAX_MANIFEST_NBYTES = 1 << 28
MAX_INDEX_NBYTES = 1 << 32
MAX_HEADER_NBYTES = 100_000_000
"""Limit of the safetensors library itself; longer headers are refused."""
MAX_NDIM = 64

_TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n')
_TAIL_NBYTES = len(b',"digest":"') + 32 + len(b'"}\n')
_HEX128 = re.compile(r"[0-9a-f]{32}")
_DATA_FILES = {
    "safetensors": re.compile(r"data/[0-9]{5,9}\.safetensors", re.ASCII),
    "torch_dist": re.compile(r"data/[0-9]{5,9}\.distcp", re.ASCII),
}
"""By envelope, the names that a data file may have. No other path in a manifest is opened, but for
those of `EXTRA_FILES`."""
EXTRA_FILES = (".metadata", "metadata.json", "common.pt", "values.distcp")
"""What a checkpoint may have for other programs; no load of our own opens them."""
MIN_BLOCK_NBYTES = 16
MAX_BLOCK_NBYTES = 1 << 26
_MAX_NBYTES = 2**63 - 1
METADATA_PART = "$metadata"
"""Its name in `parts`; the name of a part of the state does not start with `$`."""
VERSIONS_PART = "$versions"
"""Its name in `parts`, for the versions of modules."""
KINDS_PART = "$kinds"
"""Its name in `parts`, for the classes of optimizers and stateful objects."""
USUAL_VERSION = 1
"""torch's, of a class of modules that says nothing of its version; not noted."""
MAX_METADATA_NBYTES = 64 * 1024
"""Limit in bytes of JSON text, because `ls` reads and every load broadcasts the manifest."""


class _StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct that is immutable and refuses unknown members."""


class LayoutInfo(_StrictStruct, frozen=True, kw_only=True):
    """One layout of the state, sufficient to rebuild it: see `Layout.to_dict`."""

    name: str
    axes: dict[str, int]
    order: str
    ranks: list[int]


class CutInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A dim that is cut over a group or axis of the layout, as `torch.chunk` cuts."""

    dim: int
    axis: str
    is_strided: bool = False
    """True if the cut is made in each piece that the later cuts of this dim make, and not in the
    whole: torch's `_StridedShard`."""


class PlacementInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rule by which a rank's boxes of a tensor follow from its coordinates on the layout.

    It does not state which ranks hold a tensor; the index does, box by box.
    """

    kind: Literal["whole", "cut", "runs", "per_coordinate", "irregular"]
    """The whole tensor; the box that `cuts` leave; runs of the elements of that box; one tensor for
    each coordinate, which is in its key; boxes that follow from nothing that is stored."""
    cuts: tuple[CutInfo, ...] = ()
    """The cuts, in the order in which they are made."""
    over: str = ""
    """For runs: ranks that differ along this group or axis hold other runs. Their lengths depend on
    the other tensors in the same buffer."""

    @classmethod
    def of(cls, cuts: Iterable[CutInfo]) -> PlacementInfo:
        """Return the placement with these cuts, or `WHOLE` without any."""
        cuts = tuple(cuts)
        return cls(kind="cut", cuts=cuts) if cuts else WHOLE

    def runs_over(self, axis: str) -> PlacementInfo:
        """Return the placement of runs of the boxes of this placement."""
        if self.kind == "irregular":
            return self
        return PlacementInfo(kind="runs", cuts=self.cuts, over=axis)


WHOLE = PlacementInfo(kind="whole")
PER_COORDINATE = PlacementInfo(kind="per_coordinate")
IRREGULAR = PlacementInfo(kind="irregular")


class TensorInfo(_StrictStruct, frozen=True, array_like=True, kw_only=True):
    """One logical tensor: key, element type (`DTYPES`), global shape, and the positions of its
    layout and placement in the manifest's lists. An array in the file; see `_tensor_rows`."""

    key: str
    dtype: str
    shape: list[int]
    layout: int = 0
    placement: int = 0
    fingerprint: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the whole tensor."""
        return self.numel * DTYPES[self.dtype].itemsize


Envelope = Literal["safetensors", "torch_dist"]
"""What surrounds the payload in a data file: see `holdfast.format.envelopes`."""


class FileInfo(_StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One data file: name in the directory, sizes, and the rank that wrote it.

    `header_nbytes` and `header_digest` are of all bytes that are not payload, in the order of the
    file. In `safetensors` these are the header; in `torch_dist` they lie around every chunk.
    """

    name: str
    nbytes: int
    header_nbytes: int
    header_digest: str
    writer: int
    coordinate: dict[str, int]
    envelope: Envelope = "safetensors"


class ExtraInfo(_StrictStruct, frozen=True, kw_only=True):
    """One of `EXTRA_FILES`, which the checkpoint has for other programs: size and XXH3-128."""

    name: str
    nbytes: int
    digest: str


class IndexInfo(_StrictStruct, frozen=True, kw_only=True):
    """The index file: size, XXH3-128, number of rows."""

    nbytes: int
    digest: str
    num_rows: int


class Totals(_StrictStruct, frozen=True, kw_only=True):
    """Sums: `nbytes` of all tensors once, `stored_nbytes` of all payloads with copies."""

    num_tensors: int
    nbytes: int
    stored_nbytes: int


class _Members(_StrictStruct, frozen=True, kw_only=True):
    """The members of a manifest in the order in which they are written."""

    format: str = FORMAT
    version: int = VERSION
    step: int
    save_id: str
    created: str
    holdfast: str
    torch: str
    layouts: list[LayoutInfo]
    signature: str
    block_nbytes: int
    placements: list[PlacementInfo]
    tensors: list[TensorInfo]
    parts: dict[str, Any]
    files: list[FileInfo]
    extras: list[ExtraInfo] = []
    index: IndexInfo
    totals: Totals


class Manifest(_Members, frozen=True, kw_only=True, dict=True):
    """The description of a checkpoint, except for the chunk table.

    Args:
        metadata: The user's own JSON object, which is stored among the `parts`; may be empty.
        versions: By part, the versions (torch's `_version`) other than 1 of the modules in it, by
            their names; stored among the `parts`, too. None if the save has noted none.
        kinds: By part, the classes of the optimizers and stateful objects in it, by path, each as
            `module:name`; stored among the `parts`, too. None if the save has noted none.
    """

    metadata: dict[str, Any] = {}
    versions: Mapping[str, Mapping[str, int]] | None = None
    kinds: Mapping[str, Mapping[str, Sequence[str]]] | None = None

    @cached_property
    def forms(self) -> TensorForms:
        """Return the tensors by what they have in common; the list of them does not change."""
        return TensorForms(self.tensors)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes by name of all files that it lists: data files, and those for other programs."""
        data = {file.name: file.nbytes for file in self.files}
        return data | {extra.name: extra.nbytes for extra in self.extras}

    @property
    def other_files(self) -> set[str]:
        """Names of files that may be there, too, whose bytes it does not state: `OTHER_FILES`."""
        names = self.metadata.get(OTHER_FILES)
        return set(map(str, names)) if isinstance(names, list) else set()


def has_digests(manifest: Manifest) -> bool:
    """Return True if the checkpoint has digests of its payload, as every one of our own has.

    One in a foreign format has none: it is described in memory by a manifest with `block_nbytes` 0,
    whose files have the names that they have there. `decode_manifest` accepts it only from a
    storage that says `has_digests = False` itself.
    """
    return manifest.block_nbytes != 0


class _Peek(msgspec.Struct):
    format: str
    version: int


_Form = tuple[str, tuple[int, ...], int, int]
"""Dtype, shape, layout and placement of a tensor."""


class TensorForms:
    """The tensors of a manifest by what they have in common: many tensors have few forms.

    Args:
        tensors: (n) of the manifest.

    Attributes:
        distinct: (k) the forms, in the order in which they are met.
        number: (n,) the position in `distinct` of each tensor's.

    Cost: half a microsecond a tensor, once; what is asked of it, numpy's on n numbers.
    """

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        dtypes, shapes, layouts, placements = (map(each, tensors) for each in _FORM_MEMBERS)
        known: dict[_Form, int] = {}
        rows = zip(dtypes, map(tuple, shapes), layouts, placements, strict=True)
        first = map(known.setdefault, rows, range(len(tensors)))
        first_of_each = np.fromiter(first, np.int64, len(tensors))
        self.distinct = list(known)
        firsts = np.fromiter(known.values(), np.int64, len(known))
        self.number: IntArray = np.searchsorted(firsts, first_of_each)

    @property
    def counts(self) -> IntArray:
        """Return how many tensors have each of `distinct`."""
        return np.bincount(self.number, minlength=len(self.distinct))

    @property
    def num_dims(self) -> int:
        """Return the most dims that a tensor has."""
        return max((len(shape) for _, shape, _, _ in self.distinct), default=0)

    @property
    def ndim(self) -> IntArray:
        """Return the number of dims of each tensor, (n,)."""
        lengths = [len(shape) for _, shape, _, _ in self.distinct]
        return np.array(lengths, dtype=np.int64)[self.number]

    @property
    def itemsize(self) -> IntArray:
        """Return the bytes of an element of each tensor, (n,)."""
        sizes = [DTYPES[dtype].itemsize for dtype, *_ in self.distinct]
        return np.array(sizes, dtype=np.int64)[self.number]

    def shapes(self, num_dims: int) -> IntArray:
        """Return the shape of each tensor as (n, num_dims), with ones behind its own dims."""
        return pad_shapes([shape for _, shape, _, _ in self.distinct], num_dims)[self.number]


_FORM_MEMBERS = tuple(map(attrgetter, ("dtype", "shape", "layout", "placement")))


class _TensorTexts(NamedTuple):
    """Tensors that break no rule with these layouts and placements; their rows, and their forms."""

    tensors: list[TensorInfo]
    layouts: list[LayoutInfo]
    placements: list[PlacementInfo]
    rows: msgspec.Raw
    forms: TensorForms

    def are_of(self, manifest: Manifest) -> bool:
        """Return True if a manifest has the very same tensors."""
        return self.tensors is manifest.tensors and (self.layouts, self.placements) == (
            manifest.layouts, manifest.placements
        )  # fmt: skip


class ManifestTexts:
    """The JSON of the large members of the last manifest, for one that has the same objects.

    These objects (the list of tensors, the trees of parts) are not changed by anyone.

    Args:
        max_tensors: With more of them nothing is kept.
    """

    def __init__(self, *, max_tensors: int) -> None:
        self._max_tensors = max_tensors
        self._tensors: _TensorTexts | None = None
        self._parts: dict[str, tuple[Node, msgspec.Raw]] = {}

    def tensors(self, manifest: Manifest) -> _TensorTexts | None:
        """Return what is known of the tensors of a manifest."""
        last = self._tensors
        return last if last is not None and last.are_of(manifest) else None

    def part(self, name: str, node: Node) -> msgspec.Raw:
        """Return the JSON of a part, as it is written."""
        last = self._parts.get(name)
        if last is not None and last[0] is node:
            return last[1]
        return msgspec.Raw(msgspec.json.encode(without_implied_keys({name: node})[name]))

    def keep(
        self, manifest: Manifest, tensors: _TensorTexts, parts: dict[str, msgspec.Raw]
    ) -> None:
        """Keep what was made for a manifest that is good."""
        is_small = len(manifest.tensors) <= self._max_tensors
        self._tensors = tensors if is_small else None
        self._parts = (
            {n: (node, parts[n]) for n, node in manifest.parts.items()} if is_small else {}
        )


def encode_manifest(manifest: Manifest, *, texts: ManifestTexts | None = None) -> bytes:
    """Encode `manifest.json`; PlanError if `decode_manifest` would refuse it.

    Args:
        manifest: The manifest.
        texts: Of the manifest before, brought up to date.

    Cost: about 1 µs a tensor, and next to nothing for one that `texts` has.
    """
    texts = ManifestTexts(max_tensors=0) if texts is None else texts
    known = texts.tensors(manifest)
    forms = manifest.forms if known is None else known.forms
    problem = _problem(manifest, forms, has_good_tensors=known is not None)
    if problem is not None:
        raise PlanError(f"manifest of step {manifest.step}: {problem}")
    try:
        if known is None:
            rows = msgspec.Raw(msgspec.json.encode(_tensor_rows(manifest.tensors)))
            known = _TensorTexts(
                manifest.tensors, manifest.layouts, manifest.placements, rows, forms
            )
        parts = {name: texts.part(name, node) for name, node in manifest.parts.items()}
        members = _members(manifest, rows=known.rows, parts=parts)
        body = msgspec.json.encode(members).removesuffix(b"}")
    except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
        raise PlanError(f"manifest of step {manifest.step} cannot be written: {error}") from error
    data = body + b',"digest":"' + digest128(body).encode() + b'"}\n'
    if len(data) > MAX_MANIFEST_NBYTES:
        raise PlanError(
            f"the manifest of step {manifest.step} has {len(data)} bytes, the limit is "
            f"{MAX_MANIFEST_NBYTES}: store large values as arrays or tensors"
        )
    texts.keep(manifest, known, parts)
    return data


def decode_manifest(
    data: bytes, *, place: str = "manifest.json", needs_digests: bool = True
) -> Manifest:
    """Decode and check the bytes of `manifest.json`; the result is safe to act upon.

    With `needs_digests=False` it may be the description of a foreign checkpoint: `has_digests`.

    Raises:
        CorruptionError: A byte is wrong, the version is newer, or a rule of the format is broken.
    """
    if len(data) > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{place}: {len(data)} bytes exceed the limit {MAX_MANIFEST_NBYTES}")
    body, tail = data[:-_TAIL_NBYTES], _TAIL.fullmatch(data[-_TAIL_NBYTES:])
    is_intact = tail is not None and tail[1].decode() == digest128(body)
    text = body + b"}"
    # The version before the digest: a newer format may compute its digest in another way.
    peek = _peek(text if is_intact else data)
    if peek is not None and peek.format == FORMAT and peek.version > VERSION:
        damage = "" if is_intact else " (or damaged: its digest does not match)"
        raise CorruptionError(
            f"{place}: written by a newer Holdfast with format version {peek.version}, this one "
            f"reads {VERSION}{damage}; update Holdfast to read it"
        )
    if not is_intact:
        raise CorruptionError(
            f"{place}: damaged: its digest does not match its bytes; use another copy or step"
        )
    if peek is None:
        raise CorruptionError(f"{place}: it does not state a format and version")
    try:
        manifest = _decode(text)
    except (CorruptionError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{place}: this is not a manifest of version {peek.version}: {error}"
        ) from None
    problem = _problem(manifest, manifest.forms)
    if problem is None and needs_digests and not has_digests(manifest):
        # No file that is read can switch the checks off.
        problem = "block_nbytes 0: it states no digests"
    if problem is not None:
        raise CorruptionError(f"{place}: {problem}")
    return manifest


def _members(
    manifest: Manifest, *, rows: msgspec.Raw, parts: Mapping[str, msgspec.Raw]
) -> dict[str, Any]:
    """Return the members as they are written, in order; the large ones are JSON already."""
    table = {name: getattr(manifest, name) for name in _Members.__struct_fields__}
    if not manifest.extras:
        del table["extras"]
    added: dict[str, Node] = {}
    if manifest.versions is not None:
        added[VERSIONS_PART] = encode_tree(manifest.versions)
    if manifest.kinds is not None:
        added[KINDS_PART] = encode_tree(manifest.kinds)
    if manifest.metadata:
        added[METADATA_PART] = encode_tree(manifest.metadata)
    table["tensors"], table["parts"] = rows, {**parts, **added}
    return table


def _tensor_rows(tensors: Sequence[TensorInfo]) -> list[list[Any]]:
    """Return tensors as they are written: trailing members that are 0 or null are left out."""
    tails: dict[tuple[int, int, str | None], list[Any]] = {}
    for each in {(t.layout, t.placement, t.fingerprint) for t in tensors}:
        num = 3 if each[2] is not None else 2 if each[1] else 1 if each[0] else 0
        tails[each] = [*each[:num]]
    return [
        [t.key, t.dtype, t.shape, *tails[t.layout, t.placement, t.fingerprint]] for t in tensors
    ]


def _decode(text: bytes) -> Manifest:
    """Decode the text of a manifest whose digest was checked."""
    decoded = decode_json_as(text, _Members)
    table = {name: getattr(decoded, name) for name in _Members.__struct_fields__}
    node = decoded.parts.pop(METADATA_PART, None)
    if node is not None:
        table["metadata"] = decode_metadata(node)
    if VERSIONS_PART in decoded.parts:
        table["versions"] = decode_versions(decoded.parts.pop(VERSIONS_PART))
    if KINDS_PART in decoded.parts:
        table["kinds"] = decode_kinds(decoded.parts.pop(KINDS_PART))
    fill_implied_keys(decoded.parts, limit=MAX_MANIFEST_NBYTES)
    return Manifest(**table)


def _peek(text: bytes) -> _Peek | None:
    """Return format and version; None if the text has none."""
    try:
        return decode_json_as(text, _Peek)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _problem(m: Manifest, forms: TensorForms, *, has_good_tensors: bool = False) -> str | None:
    """Describe the first rule of the format that a manifest breaks, or return None.

    Args:
        m: The manifest.
        forms: Of its tensors.
        has_good_tensors: Whether they are known to break none.
    """
    if m.format != FORMAT or m.version != VERSION:
        return f"format {m.format!r} version {m.version} is not {FORMAT!r} version {VERSION}"
    if not 0 <= m.step < 10**18:
        return f"step {m.step} is not in [0, 10**18)"
    power = m.block_nbytes.bit_count() == 1
    if not has_digests(m):
        pass  # a foreign checkpoint, described in memory: see `has_digests`
    elif not power or not MIN_BLOCK_NBYTES <= m.block_nbytes <= MAX_BLOCK_NBYTES:
        return (
            f"block_nbytes {m.block_nbytes} is not a power of two "
            f"from {MIN_BLOCK_NBYTES} to {MAX_BLOCK_NBYTES}"
        )
    return (
        (None if has_good_tensors else _tensor_problem(m, forms.distinct))
        or _file_problem(m)
        or _extra_problem(m)
        or _total_problem(m, forms)
    )


def _tensor_problem(m: Manifest, forms: Iterable[_Form]) -> str | None:
    """Describe what is wrong with the tensors, or return None."""
    # First all at once: nearly always all is well, and many tensors have few forms.
    keys = {tensor.key for tensor in m.tensors}
    if (
        len(keys) == len(m.tensors)
        and "" not in keys
        and all(
            dtype in DTYPES
            and _is_possible(shape)
            and 0 <= layout < len(m.layouts)
            and 0 <= placement < len(m.placements)
            and all(0 <= cut.dim < len(shape) for cut in m.placements[placement].cuts)
            for dtype, shape, layout, placement in forms
        )
    ):
        return None
    seen = set()
    for tensor in m.tensors:
        if tensor.key in seen or not tensor.key:
            return f"tensor key {tensor.key!r} is empty or repeated"
        seen.add(tensor.key)
        if tensor.dtype not in DTYPES:
            return f"tensor {tensor.key!r} has the unknown element type {tensor.dtype!r}"
        if len(tensor.shape) > MAX_NDIM:
            return f"tensor {tensor.key!r} has {len(tensor.shape)} dims, the limit is {MAX_NDIM}"
        if any(size < 0 for size in tensor.shape):
            return f"tensor {tensor.key!r} has the impossible shape {tensor.shape}"
        if not _is_possible(tensor.shape):
            return f"tensor {tensor.key!r} of shape {tensor.shape} is larger than any memory"
        if not 0 <= tensor.layout < len(m.layouts):
            return f"tensor {tensor.key!r} is on layout {tensor.layout} of {len(m.layouts)}"
        if not 0 <= tensor.placement < len(m.placements):
            return f"tensor {tensor.key!r} has placement {tensor.placement} of {len(m.placements)}"
    return _cuts_problem(m)


def _cuts_problem(m: Manifest) -> str | None:
    """Describe a placement that cuts a dim which one of its tensors lacks, or return None."""
    fewest: dict[int, int] = {}
    for number, ndim in {(tensor.placement, len(tensor.shape)) for tensor in m.tensors}:
        fewest[number] = min(ndim, fewest.get(number, ndim))
    for number, ndim in fewest.items():
        for cut in m.placements[number].cuts:
            if not 0 <= cut.dim < ndim:
                return f"placement {number} cuts dim {cut.dim} of a tensor with {ndim} dims"
    return None


def _is_possible(shape: Sequence[int]) -> bool:
    """Return True if a tensor may have this shape."""
    numel = math.prod(max(size, 1) for size in shape)
    return len(shape) <= MAX_NDIM and min(shape, default=0) >= 0 and numel <= _MAX_NBYTES // 16


def _file_problem(m: Manifest) -> str | None:
    """Describe what is wrong with the data files, or return None."""
    if len({file.name for file in m.files}) != len(m.files):
        return "a data file is listed twice"
    for file in m.files:
        if has_digests(m) and _DATA_FILES[file.envelope].fullmatch(file.name) is None:
            form = data_file(0, envelope=file.envelope)
            return f"data file name {file.name!r} is not of the form {form!r}"
        most = MAX_HEADER_NBYTES + 8 if file.envelope == "safetensors" else file.nbytes
        if not 8 <= file.header_nbytes <= min(most, file.nbytes):
            return (
                f"{file.name}: a file of {file.nbytes} bytes has a header of {file.header_nbytes}"
            )
        if file.nbytes > _MAX_NBYTES:
            return f"{file.name}: {file.nbytes} bytes are too many for any file"
        if _HEX128.fullmatch(file.header_digest) is None:
            return f"{file.name}: header_digest is not 32 hexadecimal digits"
    return None


def _extra_problem(m: Manifest) -> str | None:
    """Describe what is wrong with the files for other programs, or return None."""
    if len({extra.name for extra in m.extras}) != len(m.extras):
        return "a file for other programs is listed twice"
    for extra in m.extras:
        if extra.name not in EXTRA_FILES:
            return f"{extra.name!r} is none of the files that a checkpoint may have"
        if not 0 <= extra.nbytes <= _MAX_NBYTES or _HEX128.fullmatch(extra.digest) is None:
            return f"{extra.name}: {extra.nbytes} bytes with digest {extra.digest!r} is impossible"
    return None


def _total_problem(m: Manifest, forms: TensorForms) -> str | None:
    """Describe what is wrong with index and totals, or return None."""
    if not 8 <= m.index.nbytes <= MAX_INDEX_NBYTES or _HEX128.fullmatch(m.index.digest) is None:
        return f"an index of {m.index.nbytes} bytes with digest {m.index.digest!r} is impossible"
    if m.totals.num_tensors != len(m.tensors):
        return f"totals state {m.totals.num_tensors} tensors, but {len(m.tensors)} are listed"
    nbytes = sum(
        math.prod(shape) * DTYPES[dtype].itemsize * num
        for (dtype, shape, _, _), num in zip(forms.distinct, forms.counts.tolist(), strict=True)
    )
    if m.totals.nbytes != nbytes:
        return f"totals state {m.totals.nbytes} bytes of tensors, but they have {nbytes}"
    return None


def encode_metadata(metadata: Mapping[str, object]) -> bytes:
    """Encode a user's object as the JSON of a node; empty for `{}`.

    Args:
        metadata: Strings, finite numbers, booleans, None, and lists and dicts of them with string
            keys: everything that JSON gives back unchanged.

    Raises:
        ConfigError: It contains anything else, or exceeds `MAX_METADATA_NBYTES`.
    """
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata must be a dict, got {type(metadata).__name__}")
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata cannot be written as JSON: {error}") from error
    if len(text) > MAX_METADATA_NBYTES:
        raise ConfigError(
            f"metadata has {len(text):,} bytes of JSON, the limit is {MAX_METADATA_NBYTES:,}; "
            f"store larger values in a part of the state"
        )
    if value != metadata:
        raise ConfigError(
            "metadata would come back from JSON changed: use lists instead of tuples, and strings "
            "as keys"
        )
    return msgspec.json.encode(encode_tree(value, path="metadata")) if value else b""


def decode_versions(node: Node) -> dict[str, dict[str, int]]:
    """Return the versions of modules; CorruptionError for another tree than that."""
    return _decode_noted(
        node, dict[str, dict[str, int]], f"'{VERSIONS_PART}' has no versions of modules"
    )


def decode_kinds(node: Node) -> dict[str, dict[str, list[str]]]:
    """Return the classes of objects; CorruptionError for another tree than that."""
    return _decode_noted(
        node, dict[str, dict[str, list[str]]], f"'{KINDS_PART}' has no classes of objects"
    )


def _decode_noted(node: Node, kind: type[T], problem: str) -> T:
    """Return what a save has noted of the objects of its parts."""
    noted = decode_tree(node)
    try:
        return convert_as(noted, kind)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"{problem}: {error}") from None


def decode_metadata(node: Node) -> dict[str, Any]:
    """Decode the user's object; CorruptionError if the node is not one."""
    try:
        if not is_plain_dict(node) and tag_of(node) != "dict":
            raise CorruptionError("not an object")
        value: Any = decode_tree(node, path=METADATA_PART)
        if json.loads(json.dumps(value, allow_nan=False)) != value:
            raise CorruptionError("it has values that JSON lacks")
    except (HoldfastError, TypeError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{METADATA_PART!r} is not a JSON object: {error}") from None
    return dict(value)
