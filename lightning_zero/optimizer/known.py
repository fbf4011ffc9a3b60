"""How an optimizer may be stepped: the three ways, and the classes for which it is known.

``examples/benchmarks/optimizer_ways.py`` verifies the table with a dataflow analysis of the
installed packages. A class in no row is tried on toy parameters (``watch.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch.optim import Optimizer


class Way(Enum):
    """The ways in which an optimizer may be stepped, by what its operations mix."""

    BY_ELEMENT = "by element"  # nothing: any part of a parameter alone
    BY_PARAMETER = "by parameter"  # elements of one parameter: each parameter alone
    ALL_AT_ONCE = "all at once"  # several parameters, or it is not known


CHOICES = {"element": Way.BY_ELEMENT, "parameter": Way.BY_PARAMETER, "model": Way.ALL_AT_ONCE}
"""The ways by the words of the setting ``optimizer_step``."""

TABLE: dict[str, dict[Way, str]] = {
    "torch.optim": {
        Way.BY_ELEMENT: "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
        Way.BY_PARAMETER: "Adafactor Muon",
        Way.ALL_AT_ONCE: "LBFGS SparseAdam",
    },
    "schedulefree": {
        Way.BY_ELEMENT: (
            "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference"
            " RAdamScheduleFree SGDScheduleFree SGDScheduleFreeReference"
        ),
    },
    "prodigyopt": {Way.ALL_AT_ONCE: "Prodigy"},
    "torchao": {Way.BY_PARAMETER: "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8"},
    "transformers": {Way.BY_PARAMETER: "Adafactor"},
    "pytorch_optimizer": {
        Way.BY_ELEMENT: (
            "ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod AdaPNM"
            " AdaSmooth Adam AdamC AdamG AdamW AdamWSN Adan AggMo Ano BCOS DiffGrad DualAdam"
            " EXAdam FOCUS FTRL Fira GaLore Grams GrokFastAdamW Kate LaProp Lion MADGRAD MSVAG"
            " NAdam PAdam PID PNM QHM RAdam RMSprop SGD SGDW SRMM ScheduleFreeAdamW"
            " ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix Tiger VSGD Yogi"
        ),
        Way.BY_PARAMETER: (
            "AdaFactor AdaGO AdaMuon AdaShift AdaTAM Adalite AdamP Aida Amos ApolloDQN CAME Conda"
            " FAdam FlashAdamW MARS Muon MuonClip Nero NorMuon NovoGrad RACS ROSE Ranger SCION"
            " SCIONLight SGDP SGDSaI SM3 SOAP ScalableShampoo Shampoo StableAdamW TAM"
        ),
        Way.ALL_AT_ONCE: (
            "A2Grad ASGD AdaGC AdaHessian AdaNorm Adai AdamS Alice AliG AvaGrad DASH DAdaptAdaGrad"
            " DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD EmoFact EmoLynx EmoNavi Fromage Gravity"
            " Kron LARS LBFGS Lamb LoRARite Prodigy Ranger21 SPAM SPlus SWATS SaRA SophiaH"
            " SpectralSphere StableSPAM"
        ),
    },
}

_COARSER_WITH: dict[str, dict[tuple[str, bool], Way]] = {
    "pytorch_optimizer": {
        **dict.fromkeys(
            [(name, True) for name in ("adanorm", "cautious", "stable_adamw", "use_gc")],
            Way.BY_PARAMETER,
        ),
        # ScalableShampoo then draws random numbers for each matrix.
        ("shape_interpretation", False): Way.ALL_AT_ONCE,
    },
    "torchao": {("bf16_stochastic_round", True): Way.ALL_AT_ONCE},
}
"""Options of a package's classes, and their values, with which they step in a coarser way."""


class Known(NamedTuple):
    """A row of the table: the package's name, and how its class steps."""

    package: str
    way: Way


def known_class(cls: type) -> Known | None:
    """Return how a class is known to step.

    A subclass that overrides nothing but its constructor steps as its base does.
    """
    while issubclass(cls, Optimizer):
        for package, ways in TABLE.items():
            if cls.__module__ == package or cls.__module__.startswith(f"{package}."):
                found = (way for way, names in ways.items() if cls.__name__ in names.split())
                return next((Known(package, way) for way in found), None)
        if len(cls.__bases__) > 1 or not _adds_nothing(cls):
            return None
        cls = cls.__bases__[0]
    return None


def _adds_nothing(cls: Any) -> bool:
    """Return whether a class overrides nothing but its constructor."""
    # Torch wraps the step of a class when the first instance is made, also if it is inherited.
    own = {name for name in vars(cls) if not name.startswith("__") and name != "_abc_impl"}
    is_wrapped = "step" in own and _unhooked(cls.step) is _unhooked(cls.__bases__[0].step)
    own -= {"step"} if is_wrapped else set()
    return not own and not {"__setstate__", "__getstate__", "__getattribute__"} & vars(cls).keys()


def _unhooked(step: Any) -> Any:
    """Return a ``step`` without torch's wrapper that calls hooks."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def is_patched(cls: Any) -> bool:
    """Return whether the ``step`` of a class was replaced by a package other than its own.

    As by a mock or a profiler, which may count the calls.
    """
    owner = next(one for one in cls.__mro__ if "step" in vars(one))
    made_in = getattr(_unhooked(cls.step), "__globals__", {}).get("__name__", "")
    packages = {one.partition(".")[0] for one in ("torch", owner.__module__)}
    return made_in.partition(".")[0] not in packages


def known_way(optimizer: Optimizer) -> Way | None:
    """Return how an optimizer with these options is known to step, ``None`` if it is not."""
    if (known := known_class(type(optimizer))) is None:
        return None
    options: Sequence[Mapping[str, Any]] = (vars(optimizer), *optimizer.param_groups)
    found = [
        way
        for (name, value), way in _COARSER_WITH.get(known.package, {}).items()
        if any(name in one and bool(one[name]) is value for one in options)
    ]
    return max(known.way, *found, key=list(Way).index) if found else known.way


def may_step_in_batches(optimizer: Optimizer) -> bool:
    """Return whether a step changes nothing that members share, so that batches are as one step."""
    cls = type(optimizer)
    return known_class(cls) == ("torch.optim", Way.BY_ELEMENT) and not is_patched(cls)


def wraps_states(cls: type) -> bool:
    """Return whether a class is known to keep states in tensors that wrap others."""
    return (known := known_class(cls)) is not None and known.package == "torchao"
