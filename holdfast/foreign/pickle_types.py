"""The list of what a pickle may ask for: every name, and the inert value that is made for it.

What is not here is refused by its name. A class that is only carried along is a `Record`; to add
one means to add its name to `_RECORDS`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from holdfast.foreign.pickled_values import (
    Args,
    Constructor,
    EnumValue,
    PickledArray,
    PickledDeque,
    PickledMapping,
    PickledNumpyType,
    PickledStorage,
    PickledTensor,
    Record,
    TorchSize,
    dims,
    index,
)
from holdfast.format.dtypes import STORAGE_DTYPES, TORCH_DTYPES

_MAX_DEQUE = 2**62

_NAMES_ONLY = (
    "builtins.object", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
    "numpy.ndarray", "typing.Any",
    *(f"numpy.{name}" for name in (
        "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
        "uint32", "uint64", "bool_", "bool", "complex64", "complex128", "str_", "bytes_",
    )),
)  # fmt: skip

_RECORDS = (
    "argparse.Namespace", "types.SimpleNamespace", "_io.BytesIO", "uuid.UUID", "decimal.Decimal",
    "datetime.timezone", "torch.device", "torch.serialization._get_layout",
    # Tensors that are more than a view of one storage.
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor", "torch._utils._rebuild_xla_tensor",
    # PyTorch DCP.
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.distributed.checkpoint._hf_utils._HFStorageInfo",
    "torch.distributed.checkpoint._hf_planner._HFStorageInfo",
    "torch.distributed.checkpoint.hf_storage._HFStorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.metadata.ShardMetadata",
    # What Megatron caches with it: the plans by which ranks have written.
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.BytesIOWriteData",
    # Megatron.
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    "megatron.core.dist_checkpointing.mapping.ShardedObject",
    "megatron.core.rerun_state_machine.Call", "megatron.core.rerun_state_machine.Caller",
    "megatron.core.rerun_state_machine.QuickStats",
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    "transformer_engine.common.recipe._FormatHelper", "transformer_engine.common.recipe.Format",
    "transformer_engine.common.recipe.Recipe", "transformer_engine.common.recipe.DelayedScaling",
    "transformer_engine.common.recipe.Float8CurrentScaling",
    "transformer_engine.common.recipe.Float8BlockScaling",
    "transformer_engine.common.recipe.MXFP8BlockScaling",
    "transformer_engine.common.recipe.NVFP4BlockScaling",
    "transformer_engine.common.recipe.MMParams", "transformer_engine.common.recipe.QParams",
    # DeepSpeed.
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    # Random generators of NumPy.
    "numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__randomstate_ctor", "numpy.random._pcg64.PCG64",
    "numpy.random._pcg64.PCG64DXSM", "numpy.random._mt19937.MT19937",
    "numpy.random._philox.Philox", "numpy.random._sfc64.SFC64",
    "numpy.random.bit_generator.SeedSequence",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    # OmegaConf, whose configurations are among the hyperparameters of Lightning and NeMo.
    "omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig",
    "omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata", "omegaconf.nodes.AnyNode",
    "omegaconf.nodes.StringNode", "omegaconf.nodes.IntegerNode", "omegaconf.nodes.FloatNode",
    "omegaconf.nodes.BooleanNode", "omegaconf.nodes.BytesNode", "omegaconf.nodes.PathNode",
)  # fmt: skip

_PATHS = tuple(
    f"{module}.{name}"
    for module in ("pathlib", "pathlib._local")
    for name in (
        "Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"
    )
)  # fmt: skip

_DICTS = (
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)


def _numbered(*members: str, start: int = 1) -> dict[object, str]:
    return dict(enumerate(members, start))


def _by_text(*members: str) -> dict[object, str]:
    return {member.lower(): member for member in members}


_MODEL_TYPES = _numbered("encoder_or_decoder", "encoder_and_decoder", "retro_encoder")
_ENUMS: dict[str, dict[object, str]] = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _numbered(
        "TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT", start=0
    ),
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _numbered(
        "TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT", start=0
    ),
    "torch.distributed.checkpoint.planner.WriteItemType": _numbered("TENSOR", "SHARD", "BYTE_IO"),
    "torch.distributed.checkpoint.filesystem.SerializationFormat": _by_text(
        "TORCH_SAVE", "SAFETENSORS"
    ),
    "megatron.core.enums.ModelType": _MODEL_TYPES,
    "megatron.core.enums.Fp8Recipe": {
        n: n for n in ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")
    },
    "megatron.core.enums.Fp4Recipe": {n: n for n in ("nvfp4", "custom")},
    "megatron.core.transformer.enums.ModelType": _MODEL_TYPES,
    "megatron.core.transformer.enums.LayerType": {},  # its numbers changed between versions
    "megatron.core.transformer.enums.AttnType": _numbered("self_attn", "cross_attn"),
    "megatron.core.transformer.enums.AttnMaskType": _numbered(
        "padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"
    ),
    "megatron.core.transformer.enums.AttnBackend": _numbered(
        "flash", "fused", "unfused", "local", "auto"
    ),
    "megatron.core.transformer.enums.CudaGraphScope": {},
    "megatron.core.rerun_state_machine.RerunDiagnostic": _by_text(
        "CORRECT_RESULT", "TRANSIENT_ERROR", "PERSISTENT_ERROR"
    ),
    "megatron.core.rerun_state_machine.RerunMode": _by_text(
        "DISABLED", "VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS"
    ),
    "megatron.core.rerun_state_machine.RerunState": _numbered(
        "NOT_RUNNING_YET", "INITIAL_RUN", "RERUNNING_IN_PLACE", "WILL_RERUN_FROM_CHECKPOINT",
        "RERUNNING_FROM_CHECKPOINT", "RERUNNING_AGAIN_FROM_CHECKPOINT", start=0,
    ),
    "megatron.core.rerun_state_machine.RerunValidationStatus": _by_text(
        "RERUN_DISABLED", "INITIAL_RUN", "FIRST_RERUN_NOT_REPRODUCIBLE",
        "FIRST_RERUN_REPRODUCIBLE", "SECOND_RERUN_NOT_REPRODUCIBLE", "SECOND_RERUN_REPRODUCIBLE",
    ),
    "megatron.core.datasets.utils.Split": _numbered("train", "valid", "test", start=0),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _numbered(
        "disabled", "optimizer_states", "gradients", "weights", start=0
    ),
    "signal.Signals": {},
}  # fmt: skip
"""Enum -> member of each value, where they are the same in all versions."""


# Built-in types. Each takes what Python's own pickles have as arguments, and nothing else.


def _one(args: Args, *kinds: type) -> Any:
    """Return the only argument, of one of these types."""
    if len(args) != 1 or type(args[0]) not in kinds:
        raise ValueError("other arguments than those that Python writes")
    return args[0]


def _none(args: Args) -> None:
    if args:
        raise ValueError("arguments, where Python writes none")


def _make_bytes(args: Args) -> bytes:
    if not args:
        return b""
    if len(args) == 2:
        return _encoded(args)
    return bytes(_one(args, bytes, bytearray))


def _encoded(args: Args) -> bytes:
    """`_codecs.encode`: how protocols below 3 store bytes."""
    text, encoding = args if len(args) == 2 else (None, None)
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("a text that is not bytes in latin1")
    return text.encode("latin-1")


def _make_range(args: Args) -> range:
    if not 1 <= len(args) <= 3 or any(type(arg) is not int for arg in args):
        raise ValueError("a range that is not of integers")
    return range(*args)


def _make_slice(args: Args) -> slice:
    if not 1 <= len(args) <= 3 or any(type(a) not in (int, str, type(None)) for a in args):
        raise ValueError("a slice that is not of integers")
    return slice(*args)


def _make_complex(args: Args) -> complex:
    real, imag = args
    if type(real) is not float or type(imag) is not float:
        raise ValueError("a complex number that is not two numbers")
    return complex(real, imag)


def _built(cls: Callable[..., object], *kinds: type) -> Callable[[Args], object]:
    """Return what calls a type with no argument, or with one of some types."""
    return lambda args: cls(_one(args, *kinds)) if args else cls()


def _make_dict(args: Args) -> dict[object, object]:
    _none(args)
    return {}


def _fill(target: PickledMapping, items: object) -> PickledMapping:
    """Add a dict, or pairs with plain keys as Python 2 wrote an OrderedDict."""
    if isinstance(items, dict):
        target.update(items)
        return target
    if type(items) is not list:
        raise ValueError("a mapping that is made of no pairs")
    for pair in items:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) is not str:
            raise ValueError("a mapping that is made of no pairs")
        target[pair[0]] = pair[1]
    return target


def _mapping(name: str) -> Callable[[Args], PickledMapping]:
    def make(args: Args) -> PickledMapping:
        if len(args) > 1:
            raise ValueError("more than one argument")
        return _fill(PickledMapping(name), args[0]) if args else PickledMapping(name)

    return make


def _make_defaultdict(args: Args) -> PickledMapping:
    factory = args[0] if args else None
    if len(args) > 2 or not (factory is None or type(factory) is Constructor):
        raise ValueError("a default factory that is not a listed name")
    made = PickledMapping("collections.defaultdict", factory)
    return _fill(made, args[1]) if len(args) == 2 else made


def _make_deque(args: Args) -> PickledDeque:
    items, longest = (*args, (), None)[:2] if args else ((), None)
    if longest is not None and index(longest, "a length") > _MAX_DEQUE:
        raise ValueError("a deque that may be longer than anything in memory")
    if not isinstance(items, list | tuple):
        raise ValueError("other arguments than those that Python writes")
    made = PickledDeque(longest)
    made.extend(items)
    return made


def _reconstruct(args: Args) -> object:
    """`copyreg._reconstructor`: how protocols below 2 make an object."""
    cls, base, state = args
    if type(cls) is not Constructor or cls.make is None or type(base) is not Constructor:
        raise ValueError("a class that is not a listed name")
    if base.name != "builtins.object" or state is not None:
        raise ValueError(f"a base {base.name} with a state")
    return cls.make(())


def _make_record(name: str) -> Callable[[Args], Record]:
    return lambda args: Record(name, args)


def _make_enum(name: str, members: Mapping[object, str]) -> Callable[[Args], EnumValue]:
    def make(args: Args) -> EnumValue:
        value = _one(args, bool, int, float, str, type(None))
        if type(value) is int and value.bit_length() > 64:
            raise ValueError("a number of more than 64 bits")
        return EnumValue(name, value, members.get(value))

    return make


def _make_member(args: Args) -> EnumValue:
    """`builtins.getattr`: how Python 3.11.0 to 3.11.3 store a member of an enum, and only that."""
    cls, member = args
    members = _ENUMS.get(cls.name) if type(cls) is Constructor else None
    if members is None or type(member) is not str or not member.isidentifier():
        raise ValueError("this is not a member of a listed enum")
    value: Any = next((value for value, name in members.items() if name == member), None)
    return EnumValue(cls.name, value, member)


def _make_path(args: Args) -> Record:
    if any(type(part) is not str for part in args):
        raise ValueError("a path that is not of texts")
    return Record("pathlib.PurePath", args)


# Dates, from the bytes that Python writes.


def _date_bytes(args: Args, nbytes: int) -> bytes:
    raw = args[0] if args else None
    if type(raw) is not bytes or len(raw) != nbytes:
        raise ValueError("a date that is not as Python writes it")
    return raw


def _make_date(args: Args) -> datetime.date:
    raw = _date_bytes(args, 4)
    return datetime.date(raw[0] << 8 | raw[1], raw[2], raw[3])


def _make_time(args: Args) -> datetime.time | Record:
    raw = _date_bytes(args, 6)
    if len(args) > 1:
        return Record("datetime.time", args)
    micro = int.from_bytes(raw[3:], "big")
    return datetime.time(raw[0] & 0x7F, raw[1], raw[2], micro, fold=raw[0] >> 7)


def _make_datetime(args: Args) -> datetime.datetime | Record:
    raw = _date_bytes(args, 10)
    if len(args) > 1:  # with a time zone, which may be a class of the user's
        return Record("datetime.datetime", args)
    year, month, micro = raw[0] << 8 | raw[1], raw[2] & 0x7F, int.from_bytes(raw[7:], "big")
    return datetime.datetime(year, month, raw[3], raw[4], raw[5], raw[6], micro, fold=raw[2] >> 7)


def _make_timedelta(args: Args) -> datetime.timedelta:
    if len(args) != 3 or any(type(arg) is not int for arg in args):
        raise ValueError("a time span that is not three integers")
    days, seconds, micros = args
    return datetime.timedelta(days=days, seconds=seconds, microseconds=micros)


# NumPy.


def _make_numpy_type(args: Args) -> PickledNumpyType:
    code = args[0] if 1 <= len(args) <= 3 else None
    if type(code) is not str:
        raise ValueError("a NumPy type without a code")
    return PickledNumpyType(code)


def _make_numpy_scalar(args: Args) -> object:
    kind, raw = args
    if type(kind) is not PickledNumpyType or type(raw) is not bytes:
        raise ValueError("a NumPy scalar that is not type and bytes")
    dtype = kind.numpy()
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are not one {dtype}")
    # Strings may be empty, which frombuffer refuses.
    return np.frombuffer(raw, dtype=dtype)[0] if raw else dtype.type()


def _make_array(args: Args) -> PickledArray:
    cls = args[0] if len(args) == 3 else None
    if type(cls) is not Constructor or cls.name != "numpy.ndarray":
        raise ValueError("an array of another class than numpy.ndarray")
    return PickledArray()


def _make_filled_array(args: Args) -> PickledArray:
    data, dtype, shape, order = args
    if order not in ("C", "F"):
        raise ValueError("an array of no known memory order")
    array = PickledArray()
    array.fill(dtype=dtype, shape=shape, is_fortran=order == "F", data=data)
    return array


# torch.


def torch_storage(name: object) -> PickledStorage:
    """Return the storage that a persistent id of torch names; ValueError if it names none."""
    if type(name) is not tuple or len(name) not in (5, 6) or name[0] != "storage":
        raise ValueError("what it names is not a storage of torch")
    _, cls, key, location, numel = name[:5]
    if len(name) == 6 and name[5] is not None:
        raise ValueError("a storage that is a view of another one is not read")
    if type(cls) is not Constructor or cls.name not in STORAGE_DTYPES:
        raise ValueError("the type of a storage is not known")
    if type(key) is not str or type(location) is not str:
        raise ValueError("a storage without key and location")
    return PickledStorage(
        key=key,
        dtype=STORAGE_DTYPES[cls.name],
        numel=index(numel, "a length"),
        location=location,
    )


def _tensor(
    view: Args, *, dtype: str | None = None, requires_grad: object = False, hooks: object = None
) -> PickledTensor:
    storage, offset, shape, stride = view
    if type(storage) is not PickledStorage:
        raise ValueError("a tensor without a storage")
    if type(requires_grad) is not bool:
        raise ValueError("a tensor whose `requires_grad` is not a bool")
    if hooks is not None and (not isinstance(hooks, dict) or hooks):
        raise ValueError("a tensor with hooks, which are code")
    return PickledTensor(
        storage=storage,
        dtype=storage.dtype if dtype is None else dtype,
        offset=index(offset, "an offset"),
        shape=dims(shape),
        stride=dims(stride),
        requires_grad=requires_grad,
    )


def _refuse_bits(metadata: object) -> None:
    is_plain = isinstance(metadata, dict) and all(bit is False for bit in metadata.values())
    if not is_plain and metadata is not None:
        raise ValueError(
            "a tensor whose conjugate or negative bit is set; store the result of "
            "resolve_conj() and resolve_neg()"
        )


def _make_tensor(args: Args) -> PickledTensor:
    return _tensor(args[:4]) if len(args) == 4 else _raise_arguments()


def _make_tensor_v2(args: Args) -> PickledTensor:
    if len(args) not in (6, 7):
        _raise_arguments()
    _refuse_bits(args[6] if len(args) == 7 else None)
    return _tensor(args[:4], requires_grad=args[4], hooks=args[5])


def _make_tensor_v3(args: Args) -> PickledTensor:
    if len(args) not in (7, 8):
        _raise_arguments()
    _refuse_bits(args[7] if len(args) == 8 else None)
    dtype = args[6]
    name = dtype.name.removeprefix("torch.") if type(dtype) is Constructor else ""
    if name not in TORCH_DTYPES:
        raise ValueError("a tensor of an unknown element type")
    return _tensor(args[:4], dtype=TORCH_DTYPES[name], requires_grad=args[4], hooks=args[5])


def _raise_arguments() -> PickledTensor:
    raise ValueError("another number of arguments than torch writes")


def _with(tensor: object, **changes: object) -> PickledTensor:
    if type(tensor) is not PickledTensor:
        raise ValueError("a parameter that is not a tensor")
    values = {name: getattr(tensor, name) for name in tensor.__dataclass_fields__}
    return PickledTensor(**(values | changes))


def _make_parameter(args: Args) -> PickledTensor:
    """`_rebuild_parameter`, and `_rebuild_parameter_with_state` with a fourth argument."""
    tensor, requires_grad, hooks = args[:3]
    if type(requires_grad) is not bool or not isinstance(hooks, dict) or hooks or len(args) > 4:
        raise ValueError("a parameter with hooks, which are code, or with unknown arguments")
    state = args[3] if len(args) == 4 else None
    return _with(tensor, requires_grad=requires_grad, attributes=state or None)


def _make_typed(args: Args) -> PickledTensor:
    """`_rebuild_from_type_v2`: a tensor of a subclass, or with attributes."""
    function, cls, inner, state = args
    if type(function) is not Constructor or function.name not in _REBUILDS:
        raise ValueError("a function that is not known to make tensors")
    if type(cls) is not Constructor or type(inner) is not tuple:
        raise ValueError("a tensor of an unknown class")
    if cls.name not in (
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    ):
        raise ValueError(f"a tensor of the class {cls.name}")
    return _with(_REBUILDS[function.name](inner), attributes=state or None)


def _make_size(args: Args) -> TorchSize:
    return TorchSize(dims(_one(args, tuple, list))) if args else TorchSize()


_REBUILDS: Mapping[str, Callable[[Args], PickledTensor]] = {
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _make_tensor_v3,
    "torch._utils._rebuild_parameter": _make_parameter,
    "torch._utils._rebuild_parameter_with_state": _make_parameter,
}
_ARRAYS: Mapping[str, Callable[[Args], object]] = {
    "multiarray.scalar": _make_numpy_scalar,
    "multiarray._reconstruct": _make_array,
    "numeric._frombuffer": _make_filled_array,
}


def _constructors() -> Iterator[Constructor]:
    """Every constructor of the standard list."""
    name: str
    make: Callable[[Args], object] | None
    for name, make in {
        "bytes": _make_bytes, "bytearray": lambda args: bytearray(_make_bytes(args)),
        "list": _built(list, list, tuple), "tuple": _built(tuple, list, tuple),
    }.items():  # fmt: skip
        yield Constructor(f"builtins.{name}", make, copies=True)
    for name, make in {
        "range": _make_range, "slice": _make_slice, "int": _built(int, int, bool),
        "float": _built(float, float, int), "complex": _make_complex, "dict": _make_dict,
        "bool": lambda args: bool(_one(args, bool, int)), "str": None,
    }.items():  # fmt: skip
        yield Constructor(f"builtins.{name}", make)
    for kind in (set, frozenset):
        make = _built(kind, list, tuple, set, frozenset)
        yield Constructor(f"builtins.{kind.__name__}", make, copies=True, hashes=True)
    yield Constructor("_codecs.encode", _encoded, copies=True)
    yield Constructor("copyreg._reconstructor", _reconstruct)
    for name in ("collections.OrderedDict", *_DICTS):
        yield Constructor(name, _mapping(name), copies=True)
    yield Constructor("collections.Counter", _mapping("collections.Counter"), copies=True)
    yield Constructor("collections.defaultdict", _make_defaultdict, copies=True)
    yield Constructor("collections.deque", _make_deque, copies=True)
    for name, make in {
        "date": _make_date, "time": _make_time, "datetime": _make_datetime,
        "timedelta": _make_timedelta,
    }.items():  # fmt: skip
        yield Constructor(f"datetime.{name}", make)
    for name in _RECORDS:
        yield Constructor(name, _make_record(name))
    for name, members in _ENUMS.items():
        yield Constructor(name, _make_enum(name, members))
    yield Constructor("builtins.getattr", _make_member)
    for name in _PATHS:
        yield Constructor(name, _make_path)
    yield Constructor("numpy.dtype", _make_numpy_type)
    for core in ("numpy.core", "numpy._core"):
        for name, make in _ARRAYS.items():
            yield Constructor(f"{core}.{name}", make, copies=name == "multiarray.scalar")
    for name, make in _REBUILDS.items():
        yield Constructor(name, make)
    yield Constructor("torch._tensor._rebuild_from_type_v2", _make_typed)
    yield Constructor("torch.Size", _make_size)
    for name in (*_NAMES_ONLY, *STORAGE_DTYPES, *(f"torch.{dtype}" for dtype in TORCH_DTYPES)):
        yield Constructor(name)


STANDARD_TYPES: Mapping[str, Constructor] = MappingProxyType(
    {constructor.name: constructor for constructor in _constructors()}
)
"""What checkpoints of PyTorch, Megatron, Lightning and Accelerate contain, by "module.name"."""
