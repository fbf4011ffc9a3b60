"""A model about which questions of memory are asked: its skeleton, its optimizer and its batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.draft import BundleDraft, UnitDraft, draft_units
from lightning_zero.engine import Engine
from lightning_zero.memory.dry_run import Event, Step, Stretch, dry_run, skeleton
from lightning_zero.memory.moments import Moment, Pace, moments, without_units
from lightning_zero.memory.terms import KINDS, RESTING, StateOf, terms_of_drafts
from lightning_zero.optim import StateBytes, check_can_be_cut, state_bytes
from lightning_zero.piece import Piece
from lightning_zero.plan import RECIPES, Offload
from lightning_zero.settings import Settings
from lightning_zero.wrap import UnitPolicy

Optimizers = str | Callable[[list[Parameter]], Optimizer] | None

_META = torch.device("meta")
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class Subject:
    """A model on ``meta`` with its optimizer and batch; the arguments are those of ``estimate``.

    Attributes:
        module: The model on ``meta``; ``None`` if only a number of parameters is known.
        num_parameters: Elements of all parameters, ties counted once.
        nbytes: Bytes of all parameters and buffers, whole and in dtypes of their own.
    """

    def __init__(
        self,
        model_or_numel: nn.Module | Callable[[], nn.Module] | int,
        *,
        precision: str = "32-true",
        optimizer: Optimizers = None,
        batch: Any = None,
        step: Step | None = None,
        checkpointing: bool = False,
        units: UnitPolicy = "auto",
        device: torch.device,
    ) -> None:
        if precision not in RECIPES:
            raise ValueError(
                f"Expected a precision among {', '.join(map(repr, RECIPES))}, got {precision!r}."
            )
        if batch is not None and device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "Activations on 'cuda' are counted where torch finds a CUDA device, for its kernels"
                " decide what they keep. Leave `batch` out, or count them as on the 'cpu'."
            )
        self.precision = precision
        self.recipe = RECIPES[precision]
        self.batch, self.step, self.device = batch, step, device
        self.units, self.checkpointing = units, checkpointing
        self._dtype = _TRUE_DTYPES.get(precision)
        self.module: nn.Module | None = None
        if isinstance(model_or_numel, int):
            if model_or_numel < 1:
                raise ValueError(f"Expected a number of parameters >= 1, got {model_or_numel}.")
            if batch is not None:
                raise ValueError("A number of parameters has no activations; pass the model.")
            parameters = [Parameter(torch.empty(model_or_numel, device="meta", dtype=self._dtype))]
        else:
            self.module = skeleton(_built(model_or_numel), self._converted)
            parameters = list(self.module.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self._parameters = parameters
        self.nbytes = sum(parameter.nbytes for parameter in parameters) + self._buffers
        self._optimizers = _optimizers(self.module, parameters, optimizer)
        self._own: dict[int, Parameter] = {}
        self._stretches: dict[bool, list[Stretch]] = {}

    @property
    def has_activations(self) -> bool:
        """Whether there is a batch to count activations with."""
        return self.batch is not None

    def checkpointed(self) -> Subject:
        """The same with activation checkpointing."""
        other = copy.copy(self)
        other.checkpointing, other._stretches = True, {}
        return other

    @classmethod
    def of_engine(
        cls,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        *,
        precision: str,
        batch: Any = None,
    ) -> Subject:
        """The model that ``engine`` shards, with the optimizers that step it."""
        dtypes = {id(p): b.dtype for u in engine.units for b in u.bundles for p in b.parameters}
        bare = skeleton(engine.module, lambda tensor: dtypes.get(id(tensor), tensor.dtype))
        subject = cls(
            bare,
            precision=precision,
            optimizer=torch.optim.SGD,
            batch=batch,
            units=engine.settings.units,
            device=engine.settings.device,
        )
        assert subject.module is not None
        pairs = zip(engine.module.parameters(), subject.module.parameters(), strict=True)
        subject._own = {id(parameter): own for parameter, own in pairs}
        subject._optimizers = list(optimizers)
        return subject

    def _converted(self, tensor: Tensor) -> torch.dtype:
        """The dtype that ``*-true`` precisions give a parameter or a buffer."""
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype

    def moments(
        self,
        stage: int,
        world_size: int,
        *,
        rank: int = 0,
        num_microbatches: int = 1,
        shares_memory: bool = False,
        offload: Offload | None = None,
        **settings: Any,
    ) -> list[Moment]:
        """A step under a stage (0 is DDP) over so many ranks; ``settings`` are the engine's."""
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"Expected world_size >= 1, got {world_size!r}.")
        if not 0 <= rank < world_size:
            raise ValueError(f"Expected a rank from 0 to {world_size - 1}, got {rank!r}.")
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"Expected stage among 0 (DDP), 1, 2, 3, got {stage!r}.")
        if offload is not None and (stage == 0 or (stage < 3 and offload.weights)):
            raise ValueError(
                f"stage={stage} keeps whole weights on every device"
                f"{'' if stage else ', and whole optimizer states'}; expected stage=3 to offload"
                f" weights, or stage 1 to 3 to offload the optimizer, got {offload}."
            )
        if stage == 0:
            return self._under_ddp(adds_gradients=num_microbatches > 1)
        for optimizer in self._optimizers:
            check_can_be_cut(optimizer)
        chosen = Settings(stage, self.recipe, self.units, device=_META, **settings)
        drafts = self._drafts(chosen)
        terms = terms_of_drafts(
            drafts,
            self._state_of,
            numbers={id(p): number for number, p in enumerate(self._parameters)},
            world_size=world_size,
            rank=rank,
            receives=self.device.type == "cpu" and not shares_memory,
            offload=offload,
        )
        plans = (plan for draft in drafts for _, plan in draft.bundles)
        pace = Pace(
            chosen.prefetch,
            chosen.reshard_after_forward,
            num_microbatches,
            reduces_every=next(plans).reduces_every_microbatch,
            shares_memory=shares_memory and world_size > 1,
            offloads=offload is not None,
        )
        if self.module is None:
            return without_units(terms, pace)
        return moments(terms, self.stretches(is_cast=True), self._buffers, pace)

    def _under_ddp(self, *, adds_gradients: bool) -> list[Moment]:
        """A step's last microbatch; earlier ones' gradients are there if new ones are added."""
        trainable = [p for p in self._parameters if p.requires_grad]
        state_of = self._state_of
        grads = sum(p.nbytes for p in trainable)
        resting = dict.fromkeys(RESTING, 0)
        resting["weights"] = sum(p.nbytes for p in self._parameters)
        resting["gradients"] = grads
        resting["states"] = sum(state_of(p).of(p.numel()) for p in trainable)
        resting["buffers"] = self._buffers
        if self.module is None:
            return [Moment("", "rest", {**dict.fromkeys(KINDS, 0), **resting})]
        # Beside the gradients DDP keeps buckets of the same size, which it sends.
        still = {**resting, "gathered": 0, "unreduced": grads, "activations": 0}
        found, held, has_begun = [], grads, False
        for stretch in self.stretches(is_cast=False):
            if stretch.is_backward and not has_begun:
                # The Trainer has just dropped the gradients of the step before.
                held, has_begun = grads if adds_gradients else 0, True
            instants = []
            for event in stretch.events:
                instants.append((held, max(event.before, event.now)))
                if isinstance(event.subject, int) and not adds_gradients:
                    held += self._parameters[event.subject].nbytes
            gradients, activations = max([*instants, (held, stretch.activations)], key=sum)
            kinds = {**still, "gradients": gradients, "activations": activations}
            most = {"gradients": held, "activations": stretch.most}
            phase = "backward" if stretch.is_backward else "forward"
            found.append(Moment(stretch.unit or "", phase, kinds, at_other_times=most))
        return [*found, Moment("", "rest", still)]

    def _drafts(self, settings: Settings) -> list[UnitDraft]:
        if self.module is not None:
            return draft_units(self.module, settings)
        parameter = self._parameters[0]
        bundle = BundleDraft([("weight", parameter)], settings.plan(parameter.dtype))
        return [UnitDraft("", nn.Module(), [bundle])]

    @property
    def _buffers(self) -> int:
        return sum(self.buffer_bytes.values())

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """Bytes of the module's buffers, by name."""
        if self.module is None:
            return {}
        return {name: buffer.nbytes for name, buffer in self.module.named_buffers()}

    def state_bytes(self, parameter: Parameter, numel: int) -> int:
        """Bytes of optimizer states for ``numel`` elements of a parameter of the engine."""
        own = self._own.get(id(parameter), parameter)
        return self._state_of(own).of(numel) if own.requires_grad else 0

    @cached_property
    def _state_of(self) -> StateOf:
        """What the optimizer says of each parameter; one that it does not hold has no state."""
        found: dict[int, StateBytes] = {}
        known: dict[str, StateBytes] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                options = str({key: value for key, value in group.items() if key != "params"})
                for entry in group["params"]:
                    parameter = entry.parameter if isinstance(entry, Piece) else entry
                    parameter = self._own.get(id(parameter), parameter)
                    # Masters have the parameter's own dtype.
                    key = f"{type(optimizer)} {options} {parameter.dtype}"
                    if key not in known:
                        known[key] = state_bytes(optimizer, group, parameter.dtype)
                    found[id(parameter)] = known[key]
        return lambda parameter: found.get(id(parameter), StateBytes(0, 0))

    def stretches(self, *, is_cast: bool) -> list[Stretch]:
        """A step, from unit to unit; without a batch in the order in which units are registered.

        Args:
            is_cast: Whether forward sees weights in the precision's dtype, or as DDP leaves them.
        """
        if is_cast not in self._stretches:
            self._stretches[is_cast] = list(self._run(is_cast=is_cast))
        return self._stretches[is_cast]

    def _run(self, *, is_cast: bool) -> Iterator[Stretch]:
        assert self.module is not None
        module = skeleton(self.module)
        drafts = draft_units(module, Settings(3, self.recipe, self.units, device=_META))
        inner = [draft for draft in drafts if draft.name]
        if self.batch is None:
            yield from _in_order(module, drafts)
            return
        dtypes = {
            id(p): plan.weight.dtype if is_cast else p.dtype
            for draft in drafts
            for named, plan in draft.bundles
            for _, p in named
        }
        yield from dry_run(
            module,
            self.batch,
            units={draft.name: draft.module for draft in inner},
            recipe=self.recipe,
            casts=lambda parameter: dtypes[id(parameter)],
            checkpointed=[draft.module for draft in inner] if self.checkpointing else [],
            step=self.step,
            dtype=self._dtype,
            device=self.device,
        )


def _in_order(module: nn.Module, drafts: Sequence[UnitDraft]) -> Iterator[Stretch]:
    """A step that goes through the units as they are registered; the root's gradients come first.

    It holds the root's longest, so that no other order holds more.
    """
    numbers = {id(p): number for number, p in enumerate(module.parameters())}
    *inner, root = drafts

    def events(draft: UnitDraft) -> tuple[Event, ...]:
        named = (pair for bundle in draft.bundles for pair in bundle.named)
        return tuple(Event(numbers[id(p)]) for _, p in named if p.requires_grad)

    yield Stretch(None, False, 0)
    yield from (Stretch(draft.name, False, 0) for draft in inner)
    yield Stretch(None, True, 0, events(root))
    yield from (Stretch(draft.name, True, 0, events(draft)) for draft in reversed(inner))
    yield Stretch(None, True, 0)


def _built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with _META:
        built = model()
    if not isinstance(built, nn.Module):
        raise TypeError(
            f"Expected a module, a function that builds one or a number, got {built!r}."
        )
    return built


def _optimizers(
    module: nn.Module | None, parameters: list[Parameter], choice: Optimizers
) -> list[Optimizer]:
    """The optimizers that would step the parameters on ``meta``."""
    configure = getattr(module, "configure_optimizers", None)
    if choice is None and configure is not None:
        return list(_configured(type(module).__name__, configure))
    cls = _named(choice) if isinstance(choice, str) else choice or torch.optim.AdamW
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return [cls(trainable)] if trainable else []


def _named(name: str) -> Callable[[list[Parameter]], Optimizer]:
    known = {
        key.lower(): cls
        for key, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if name.lower() not in known:
        raise ValueError(
            f"Expected an optimizer of torch.optim ({', '.join(sorted(known))}), got {name!r}."
        )
    return known[name.lower()]


def _configured(name: str, configure: Callable[[], Any]) -> Iterator[Optimizer]:
    try:
        returned = configure()
    except Exception as error:
        raise ValueError(
            f"{name}.configure_optimizers does not run without a Trainer: {error} Pass `optimizer`,"
            " a name of torch.optim or a function of a list of parameters."
        ) from error
    found = list(_optimizers_in(returned))
    if not found:
        raise ValueError(f"{name}.configure_optimizers returned no optimizer. Pass `optimizer`.")
    yield from found


def _optimizers_in(returned: Any) -> Iterator[Optimizer]:
    """The optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(returned, Optimizer):
        yield returned
    elif isinstance(returned, Mapping):
        yield from _optimizers_in(returned.get("optimizer"))
    elif isinstance(returned, list | tuple):
        for item in returned:
            yield from _optimizers_in(item)
