"""Lightning's own examples and test helpers under every stage, held against DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
)
from lightning.pytorch.demos.lstm import SimpleLSTM
from lightning.pytorch.demos.transformer import Transformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy
from tests.oracle.projects import Run, assert_like_ddp, make_trainer, under_all
from tests.oracle.ranks import Pools


def _strategy(name: Any, units: Any = "auto") -> Any:
    return ZeROStrategy(name, units=units) if isinstance(name, int) else name


def _every_loop(strategy: Any, module: LightningModule, data: Any = None, **options: Any) -> Run:
    """Fit, validate, test and predict."""
    trainer = make_trainer(strategy, max_epochs=2, **options)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    predictions = trainer.predict(module, data)
    return Run.of(module, trainer, [trainer.global_step, predictions])


# ------------------------------------------------------------------------------ boring models


def _notes_losses(cls: type[BoringModel]) -> BoringModel:
    """A model that notes its losses, of the same values wherever it is made."""

    class Noting(cls):  # type: ignore[valid-type, misc]
        def step(self, batch: Any) -> Tensor:
            loss = super().step(batch)
            self.losses.append(loss.item())
            return loss

    torch.manual_seed(1)
    module = Noting()
    module.losses = []
    return module


class _IterableModel(BoringModel):
    """Takes the pairs of batches that `IterableBoringDataModule` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch[0]) + self.step(batch[1])}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)


def _boring(strategy: Any) -> Run:
    """Each boring model with its own loaders, and with each boring data module."""
    runs = []
    for model, data in (
        (BoringModel, None),
        (ManualOptimBoringModel, None),
        (BoringModel, BoringDataModule),
        (ManualOptimBoringModel, BoringDataModuleNoLen),
        (_IterableModel, IterableBoringDataModule),
    ):
        module = _notes_losses(model)
        # Ranks draw their own numbers, and a loader takes one from the global generator.
        torch.manual_seed(2)
        limits = {f"limit_{loop}_batches": 6 for loop in ("train", "val", "test", "predict")}
        # One linear layer is no unit by itself.
        units = {nn.Linear}
        options = {"accumulate_grad_batches": 2} if model is BoringModel else {}
        runs.append(
            _every_loop(_strategy(strategy, units), module, data and data(), **limits, **options)
        )
    return Run({}, notes=[[run.params, run.metrics, run.losses, run.notes] for run in runs])


def test_boring_models(ranks: Pools) -> None:
    runs = ranks(2).run(under_all, _boring, stages=(2, 3))
    assert [notes[3][0] for notes in runs[0]["ddp"].notes] == [6, 12, 6, 12, 12]
    assert all(len(notes[2]) > 12 for notes in runs[0]["ddp"].notes)
    assert_like_ddp(runs)


def _demo(strategy: Any) -> Run:
    torch.manual_seed(1)
    module = DemoModel()
    loader = DataLoader(torch.randn(16, 32), batch_size=2)
    trainer = make_trainer(_strategy(strategy), max_epochs=2)
    trainer.fit(module, loader)
    return Run.of(module, trainer, trainer.global_step)


def test_demo_model(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _demo, stages=(2, 3)))


# ------------------------------------------------------------------------------ language models


class LanguageModel(LightningModule):
    """The model of `LightningTransformer` or `LightningLSTM`, on tokens that need no download."""

    VOCABULARY = 23

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"vocab_size": self.VOCABULARY, "ninp": 16, "nhid": 16, "nlayers": 2}
        self.is_recurrent = name == "lstm"
        self.model: nn.Module = (
            SimpleLSTM(**sizes, dropout=0.1)
            if self.is_recurrent
            else Transformer(**sizes, nhead=2, dropout=0.1)
        )
        self.hidden: Any = None
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        if self.is_recurrent:
            self.hidden = self.model.init_hidden(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        if self.is_recurrent:
            self.hidden = [h.detach() for h in self.hidden]
            output, self.hidden = self.model(inputs, self.hidden)
        else:
            output = self.model(inputs, targets)
        loss = F.nll_loss(output, targets.view(-1))
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        if self.is_recurrent:
            return self.model(inputs, self.model.init_hidden(len(inputs)))[0]
        return self.model(inputs, targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _speak(strategy: Any, name: str, **options: Any) -> Run:
    module = LanguageModel(name)
    tokens = torch.randint(
        LanguageModel.VOCABULARY, (32, 10), generator=torch.Generator().manual_seed(0)
    )
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)
    torch.manual_seed(4)
    trainer = make_trainer(_strategy(strategy), max_epochs=2, gradient_clip_val=0.25, **options)
    trainer.fit(module, loader)
    return Run.of(module, trainer, trainer.predict(module, loader))


@pytest.mark.parametrize(("name", "stage"), [("transformer", 1), ("lstm", 2)])
def test_language_models(ranks: Pools, name: str, stage: int) -> None:
    runs = ranks(2).run(under_all, _speak, name, stages=(stage, 3))
    assert len(runs[0]["ddp"].losses) == 8
    assert_like_ddp(runs, ulps=64)
