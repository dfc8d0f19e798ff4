"""Every optimizer of the packages that people use: kept bit for bit, or refused by name.

A class that is not in a table below is built from its parameters alone and steps without a closure.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prodigyplus
import pytest
import pytorch_optimizer as po
import schedulefree
import torch
import torch_optimizer as to
from bitsandbytes import optim as bnb
from pytorch_optimizer.optimizer.scion import LMONorm
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from pytorch_optimizer.optimizer.utils.graft import SGDGraft
from pytorch_optimizer.optimizer.utils.partition import PreConditionerType
from pytorch_optimizer.optimizer.utils.preconditioner import PreConditioner

from holdfast import Codec, Codecs, HoldfastError
from tests.packages.optimizers import (
    Case,
    Words,
    around,
    differences,
    groups,
    matrices,
    only_matrices,
    plain,
    trained,
    without_scalar,
)


@dataclass(frozen=True, kw_only=True)
class Package:
    """What is special about the optimizers of one package."""

    at_least: int
    """The number of classes that are tried."""
    cases: dict[str, Case] = field(default_factory=dict)
    """By class, or by class and the name of a variant, as in 'Adam foreach'."""
    unusable: dict[str, str] = field(default_factory=dict)
    """Classes that are not tried, and why."""
    caches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of a class that are computed from the rest; under '' those of all classes."""


def of_attributes(kind: type[Any]) -> Codec:
    """The codec that a refusal asks for: an object by its attributes."""

    def decode(stored: dict[str, Any]) -> Any:
        made = kind.__new__(kind)
        vars(made).update(stored)
        return made

    return Codec(
        name=kind.__name__,
        type=kind,
        encode=lambda value: dict(vars(value)),
        decode=decode,
    )


DTYPE = Codec(
    name="dtype",
    type=torch.dtype,
    encode=str,
    decode=lambda name: getattr(torch, name.removeprefix("torch.")),
)
DTYPES = Codecs(codecs=[DTYPE])
PROJECTORS = Codecs(codecs=[of_attributes(GaLoreProjector)])
SIZE = Codec(name="size", type=torch.Size, encode=list, decode=torch.Size)
SHAMPOO = Codecs(
    codecs=[of_attributes(PreConditioner), of_attributes(SGDGraft), SIZE],
    enums=[PreConditionerType],
)
LOW_RANK = {"rank": 2, "update_proj_gap": 3, "scale": 0.25, "projection_type": "std"}
MUON = {"wide": {"use_muon": True}, "rest": {"use_muon": False}}
NO_PICKLE = r"optimizer\.{}.* cannot be stored without pickle"


def low_rank(kind: Any) -> Case:
    return Case(
        make=lambda model: kind(
            [{"params": [model.first.weight, model.second.weight], **LOW_RANK}]
        ),
        refused=NO_PICKLE.format(r"state\.first\.weight\.projector"),
        codecs=PROJECTORS,
    )


def closure(kind: Any, **options: Any) -> Case:
    return Case(make=plain(kind, **options), style="closure")


def graph(kind: Any, **options: Any) -> Case:
    return Case(make=plain(kind, **options), style="graph")


def base(kind: Any, **options: Any) -> Case:
    return Case(make=plain(kind, base_optimizer=torch.optim.AdamW, **options), style="sam")


CPU = "needs a device that is not a CPU"

PACKAGES = {
    "torch.optim": Package(
        at_least=21,
        cases={
            "LBFGS": closure(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
            "Muon": Case(make=matrices(torch.optim.Muon)),
            "SparseAdam": Case(make=plain(torch.optim.SparseAdam), model=Words),
            "Adam foreach": Case(make=plain(torch.optim.Adam, foreach=True, amsgrad=True)),
            "AdamW fused": Case(make=plain(torch.optim.AdamW, fused=True)),
            "SGD momentum": Case(make=plain(torch.optim.SGD, momentum=0.9, foreach=True)),
            "RMSprop all": Case(make=plain(torch.optim.RMSprop, centered=True, momentum=0.5)),
            "AdamW groups": Case(make=groups(torch.optim.AdamW, {"lr": 0.1}, {"eps": 1e-6})),
            "NAdam decoupled": Case(make=plain(torch.optim.NAdam, decoupled_weight_decay=True)),
        },
        caches={"LBFGS": ("._numel_cache",)},
    ),
    "pytorch_optimizer": Package(
        at_least=130,
        cases={
            **{
                kind.__name__: Case(make=groups(kind, **MUON))
                for kind in (po.AdaGO, po.AdaMuon, po.Muon, po.MuonClip, po.NorMuon)
            },
            **{
                f"{kind.__name__} foreach": Case(make=plain(kind, foreach=True))
                for kind in (po.Lion, po.AdEMAMix, po.ADOPT, po.LaProp, po.Adan, po.StableAdamW)
            },
            **{
                f"{kind.__name__} groups": Case(make=groups(kind, {"lr": 0.01}, {}))
                for kind in (po.SOAP, po.AdaBelief, po.Lion, po.Prodigy, po.ScheduleFreeAdamW)
            },
            "SOAP often": Case(make=plain(po.SOAP, precondition_frequency=2)),
            "AdaHessian": graph(po.AdaHessian),
            "SophiaH": graph(po.SophiaH, update_period=2),
            "LOMO": Case(make=po.LOMO, style="lomo"),
            "AdaLOMO": Case(make=po.AdaLOMO, style="lomo", model=only_matrices),
            "AdamMini": Case(make=po.AdamMini),
            "AliG": Case(make=plain(po.AliG, max_lr=0.1), style="loss"),
            "EmoFact": closure(po.EmoFact),
            "EmoLynx": closure(po.EmoLynx),
            "EmoNavi": closure(po.EmoNavi),
            "SAM": base(po.SAM),
            "SAM closure": closure(po.SAM, base_optimizer=torch.optim.SGD, lr=0.1, momentum=0.9),
            "FriendlySAM": base(po.FriendlySAM),
            "LookSAM": base(po.LookSAM, k=3),
            "WSAM": Case(
                make=lambda model: po.WSAM(model, trained(model), torch.optim.AdamW),
                style="closure",
            ),
            "LBFGS": closure(po.LBFGS, max_iter=3),
            "Ranger21": Case(make=plain(po.Ranger21, num_iterations=20)),
            "SpectralSphere": Case(make=matrices(po.SpectralSphere)),
            "Lookahead": Case(make=around(po.Lookahead, k=3, pullback_momentum="pullback")),
            "OrthoGrad": Case(make=around(po.OrthoGrad)),
            "TRAC": Case(make=around(po.TRAC), model=without_scalar),
            "ScheduleFreeWrapper": Case(make=around(po.ScheduleFreeWrapper)),
            "Magma": Case(make=around(po.Magma)),
            "PCGrad": Case(make=around(po.PCGrad)),
            "SafeFP16Optimizer": Case(
                make=around(po.SafeFP16Optimizer), refused="is not an optimizer: it lacks"
            ),
            "Conda": Case(
                make=plain(po.Conda),
                refused=NO_PICKLE.format(r"state\.first\.weight\.projector"),
                codecs=PROJECTORS,
            ),
            "GaLore low rank": low_rank(po.GaLore),
            "APOLLO low rank": low_rank(po.APOLLO),
            "Fira low rank": low_rank(po.Fira),
            "Kron": Case(
                make=plain(po.Kron),
                refused=NO_PICKLE.format(r"groups\.0\.precondition_dtype"),
                codecs=DTYPES,
            ),
            "ROSE": Case(
                make=plain(po.ROSE),
                refused=NO_PICKLE.format(r"groups\.0\.compute_dtype"),
                codecs=DTYPES,
            ),
            **{
                kind.__name__: Case(
                    make=plain(kind),
                    refused=NO_PICKLE.format(r"groups\.0\.norm_type"),
                    codecs=Codecs(enums=[LMONorm]),
                )
                for kind in (po.SCION, po.SCIONLight)
            },
            "ScalableShampoo": Case(
                make=plain(po.ScalableShampoo),
                refused=NO_PICKLE.format(r"state\.\S+\.pre_conditioner"),
                codecs=SHAMPOO,
            ),
        },
        unusable={
            "BSAM": "its own step fails",
            "CPUOffloadOptimizer": CPU,
            "DeMo": "needs einops, and a process group",
            "DistributedMuon": "needs a process group",
            "GSAM": "holds the model and a scheduler",
            "LoRARite": "takes only pairs of LoRA factors",
        },
        caches={"EmoFact": (".prev_loss",), "LBFGS": ("._numel_cache",), "LOMO": (".lr",)}
        | {"SaRA": ("._mask_indices",), "AdaLOMO": (".lr",)},
    ),
    "torch_optimizer": Package(
        at_least=28,
        cases={
            "Adafactor": Case(make=matrices(to.Adafactor)),
            "Adahessian": graph(to.Adahessian),
            "Lookahead": Case(
                make=around(to.Lookahead, k=3), refused=r"Lookahead\.state_dict\(\) failed"
            ),
        },
        caches={"RAdam": (".param_groups[0]['buffer']",), "Ranger": (".radam_buffer",)},
    ),
    "schedulefree": Package(
        at_least=8,
        cases={
            kind.__name__: closure(kind)
            for kind in (
                schedulefree.AdamWScheduleFreeClosure,
                schedulefree.RAdamScheduleFreeClosure,
                schedulefree.SGDScheduleFreeClosure,
            )
        },
    ),
    "prodigyopt": Package(at_least=1),
    "lion_pytorch": Package(at_least=1),
    "dadaptation": Package(at_least=5),
    "adabelief_pytorch": Package(at_least=1, caches={"AdaBelief": (".param_groups[0]['buffer']",)}),
    "prodigyplus": Package(
        at_least=2,
        cases={
            "ProdigyPlusScheduleFree factored": Case(
                make=plain(
                    prodigyplus.ProdigyPlusScheduleFree, factored=True, use_bias_correction=True
                )
            ),
        },
        unusable={"CoreOptimiser": "is the base of the others"},
        caches={"": (".parameters_to_process", ".print_version_check")},
    ),
    "transformers.optimization": Package(
        at_least=1,
        unusable={"LayerWiseDummyOptimizer": "updates nothing"},
    ),
    "torchao.optim": Package(
        at_least=4,
        unusable={"CPUOffloadOptimizer": CPU},
    ),
    "bitsandbytes.optim": Package(
        at_least=25,
        cases={
            **{
                f"{name} wide": Case(make=plain(getattr(bnb, name), min_8bit_size=8))
                for name in ("Adam8bit", "AdamW8bit", "Lion8bit", "LAMB8bit", "RMSprop8bit")
            },
            **{
                name: Case(make=plain(getattr(bnb, name), lr=0.01, momentum=0.9))
                for name in ("LARS", "LARS32bit", "LARS8bit", "SGD", "SGD32bit", "SGD8bit")
            },
            "PytorchLARS": Case(make=plain(bnb.PytorchLARS, lr=0.01, momentum=0.9)),
        },
        unusable=dict.fromkeys(("AdEMAMix32bit", "PagedAdEMAMix32bit"), "fail on a CPU"),
        caches={"": (".initialized", "._cpu_paged_warned", ".name2qmap")},
    ),
}


def classes(package: str) -> list[type[Any]]:
    """Return the optimizers that a package offers."""
    module = importlib.import_module(package)
    found = [getattr(module, name) for name in dir(module)]
    return [
        kind
        for kind in found
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]


def cases(package: str) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a package by name: every class, and the variants of the table."""
    special, known = PACKAGES[package].cases, PACKAGES[package].unusable
    yield from special.items()
    for kind in classes(package):
        if kind.__name__ not in special | known:
            yield kind.__name__, Case(make=plain(kind))


def verdict(name: str, case: Case, package: Package, root: Path) -> list[str]:
    """Return what is wrong with a case: nothing if it is kept, or refused as the table says."""
    kind = name.split()[0]
    caches = package.caches.get("", ()) + package.caches.get(kind, ())
    found: list[str] = []
    for codecs in {case.codecs if case.refused is None else None, case.codecs}:
        expected = case.refused if codecs is None else None
        try:
            wrong = list(differences(case, root, caches=caches, codecs=codecs))
            found += [f"{name}: {each}" for each in wrong]
            found += [f"{name} is not refused"] if expected is not None else []
        except HoldfastError as error:
            if expected is None or not re.search(expected, str(error)):
                found.append(f"{name} is refused: {error}")
        except Exception as error:
            found.append(f"{name} fails by itself: {type(error).__name__}: {error}")
        shutil.rmtree(root, ignore_errors=True)
    return found


def check_package(package: str, root: Path, *, every: int) -> None:
    """Try one case of so many of a package."""
    table = PACKAGES[package]
    named = [*cases(package)]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps, for a minute
        wrong = [each for name, case in named[::every] for each in verdict(name, case, table, root)]
    assert not wrong, "\n".join(wrong)
    assert len(named) >= table.at_least


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_optimizer_is_kept_or_refused(
    tmp_path: Path, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """R1, O1, O2: all is back and the next steps are bitwise the same, or a save or load raises.

    Of the large packages every third; nightly all.
    """
    check_package(package, tmp_path / "root", every=3 if PACKAGES[package].at_least > 20 else 1)
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", [name for name in PACKAGES if PACKAGES[name].at_least > 20])
def test_every_optimizer_of_large_packages_is_kept_or_refused(
    tmp_path: Path, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """R1, O1, O2."""
    check_package(package, tmp_path / "root", every=1)
    capsys.readouterr()
