"""Train small projects on other people's libraries under DDP and at every stage, and compare.

    python examples/benchmarks/libraries.py            # what is installed
    python examples/benchmarks/libraries.py gpytorch   # some of it

Each runs on two CPU processes in a fresh interpreter. It prints the table of docs/libraries.md: the
largest difference of a weight from DDP's, relative to the largest weight of all; 0 means the same
bits. ``pip install`` what is to be tried; it needs nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
WIDTH = 16


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


class Project(LightningModule):
    """A network and its optimizer."""

    def __init__(self, net: nn.Module | None = None, optimizer: Any = None) -> None:
        super().__init__()
        self.net = net or network()
        self.make = optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self)


def optimizer(module: str, name: str, **options: Any) -> Callable[[], Project]:
    """Return a project that is trained by an optimizer of a library."""

    def make() -> Project:
        found = getattr(__import__(module, fromlist=[name]), name)
        return Project(optimizer=lambda project: found(project.parameters(), **options))

    return make


def quantised(name: str) -> Callable[[], Project]:
    """Return a project with a matrix so large that an optimizer of torchao quantises its states."""

    def make() -> Project:
        project = optimizer("torchao.optim", name, lr=1e-2)()
        project.net = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        )
        return project

    return make


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x) + self.adapter(x))


def adapted(change: Callable[[nn.Linear], nn.Module]) -> Callable[[], Project]:
    """Return a project that trains adapters beside two layers, each of which is changed first."""

    def make() -> Project:
        layers = [Adapted(change(nn.Linear(64, 64))) for _ in range(2)]
        return Project(nn.Sequential(nn.Linear(WIDTH, 64), *layers, nn.Linear(64, 4)))

    return make


def in_bits(name: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    """Return what replaces a layer by one of bitsandbytes, and quantises its weight."""

    def change(linear: nn.Linear) -> nn.Module:
        import bitsandbytes

        made: nn.Module = getattr(bitsandbytes.nn, name)(64, 64, **options)
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")

    return change


def float8() -> Project:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    net = convert_to_float8_training(network(), config=Float8LinearConfig(emulate=True))
    return Project(net)


def adam_mini() -> Project:
    from adam_mini import Adam_mini

    return Project(optimizer=lambda p: Adam_mini(p.named_parameters(), lr=1e-2, dim=32, n_heads=4))


def metric_learning() -> Project:
    from pytorch_metric_learning import losses, miners

    class Metric(Project):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = losses.ArcFaceLoss(num_classes=4, embedding_size=4)
            self.miner = miners.MultiSimilarityMiner()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            found = self.net(x)
            return self.criterion(found, y, self.miner(found, y))

    return Metric()


def ema() -> Project:
    from ema_pytorch import EMA

    class Averaged(Project):
        def on_fit_start(self) -> None:
            self.average = [EMA(self.net, beta=0.9, update_every=1, update_after_step=0)]

        def on_train_batch_end(self, *args: Any) -> None:
            self.average[0].update()

        def on_train_end(self) -> None:
            self.found = {
                f"ema.{k}": v.clone() for k, v in self.average[0].ema_model.state_dict().items()
            }

    return Averaged()


def torch_ema() -> Project:
    from torch_ema import ExponentialMovingAverage

    class Averaged(Project):
        def on_fit_start(self) -> None:
            self.average = ExponentialMovingAverage(self.parameters(), decay=0.9)

        def on_train_batch_end(self, *args: Any) -> None:
            self.average.update()

        def on_train_end(self) -> None:
            with self.average.average_parameters():
                self.found = {f"ema.{k}": v.detach().clone() for k, v in self.named_parameters()}

    return Averaged()


def lora() -> Project:
    import loralib

    net = nn.Sequential(loralib.Linear(WIDTH, 32, r=4), nn.Tanh(), loralib.Linear(32, 4, r=2))
    loralib.mark_only_lora_as_trainable(net, bias="lora_only")
    return Project(net)


def lycoris() -> Project:
    from lycoris import LycorisNetwork, create_lycoris

    LycorisNetwork.apply_preset({"target_module": ["Linear"]})
    net = network()
    net.requires_grad_(False)
    wrapped = create_lycoris(net, 1.0, linear_dim=4, linear_alpha=2.0, algo="lokr")
    wrapped.apply_to()
    project = Project(net)
    project.adapter = wrapped
    project.make = lambda p: torch.optim.AdamW(p.adapter.parameters(), lr=1e-2)
    return project


def gpytorch() -> Project:
    import gpytorch

    class GP(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(8, WIDTH)
            distribution = gpytorch.variational.CholeskyVariationalDistribution(8)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Regression(Project):
        def __init__(self) -> None:
            super().__init__(GP())
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
            self.bound = [gpytorch.mlls.VariationalELBO(self.likelihood, self.net, 64)]

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return -self.bound[0](self.net(x), y.float())

    return Regression()


def pyro() -> Project:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

    class Variational(Project):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            def model(x: Tensor, y: Tensor) -> None:
                shift = pyro.sample("shift", dist.Normal(torch.zeros(4), 1.0).to_event(1))
                with pyro.plate("rows", len(x)):
                    pyro.sample("y", dist.Categorical(logits=self.net(x) + shift), obs=y)

            def guide(x: Tensor, y: Tensor) -> None:
                pyro.sample("shift", dist.Normal(self.mean, self.scale.exp()).to_event(1))

            return Trace_ELBO().differentiable_loss(model, guide, x, y)

    return Variational()


def graphs() -> Project:
    from torch_geometric.nn import GCNConv

    class Graph(Project):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([GCNConv(WIDTH, 32), GCNConv(32, 4)]))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            places = torch.arange(len(x))
            edges = torch.stack([places, places.roll(1)])
            return F.cross_entropy(self.net[1](self.net[0](x, edges).relu(), edges), y)

    return Graph()


def monai() -> Project:
    from monai.networks.nets import FullyConnectedNet

    return Project(FullyConnectedNet(WIDTH, 4, [32, 32], dropout=0.0))


def monai_unet() -> Project:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    class Segmentation(Project):
        def __init__(self) -> None:
            super().__init__(UNet(2, 1, 2, channels=(4, 8), strides=(2,), norm="BATCH"))
            self.criterion = DiceLoss(to_onehot_y=True, softmax=True)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            image = x.view(-1, 1, 4, 4)
            return self.criterion(self.net(image), (image > 0).float())

    return Segmentation()


def transformers_x() -> Project:
    from x_transformers import Decoder, TransformerWrapper

    class Language(Project):
        def __init__(self) -> None:
            layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
            super().__init__(TransformerWrapper(num_tokens=16, max_seq_len=16, attn_layers=layers))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            tokens = (x.abs() * 5).long().clamp(max=15)
            return F.cross_entropy(self.net(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    return Language()


def quantize() -> Project:
    from vector_quantize_pytorch import FSQ

    class Codes(Project):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.out = FSQ(levels=[8, 5, 5, 5]), nn.Linear(4, 4)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.out(self.codes(self.net(x)[:, None])[0][:, 0]), y)

    return Codes()


def neural_ode() -> Project:
    from torchdiffeq import odeint_adjoint

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return self.net(x)

    class Ode(Project):
        def __init__(self) -> None:
            super().__init__(Flow())
            self.out = nn.Linear(WIDTH, 4)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            times = torch.tensor([0.0, 1.0])
            return F.cross_entropy(
                self.out(odeint_adjoint(self.net, x, times, method="rk4")[-1]), y
            )

    return Ode()


def attention() -> Project:
    from local_attention import LocalAttention
    from rotary_embedding_torch import RotaryEmbedding

    class Attended(Project):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([nn.Linear(1, 24), nn.Linear(8, 4)]))
            self.rotary = RotaryEmbedding(dim=8, learned_freq=True)
            self.attend = LocalAttention(
                dim=8, window_size=4, causal=True, use_rotary_pos_emb=False
            )

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            query, key, value = self.net[0](x[:, None, :, None]).chunk(3, -1)
            query, key = map(self.rotary.rotate_queries_or_keys, (query, key))
            return F.cross_entropy(self.net[1](self.attend(query, key, value).mean((1, 2))), y)

    return Attended()


def sparse_outputs() -> Project:
    import entmax

    class Sparse(Project):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor(1.5))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            spread = entmax.entmax_bisect(self.net(x), self.alpha)
            return entmax.entmax15_loss(self.net(x), y).mean() + spread.square().mean()

    return Sparse()


def augmented() -> Project:
    import kornia

    class Augmented(Project):
        def __init__(self) -> None:
            super().__init__()
            change = kornia.augmentation.RandomAffine(30.0, p=1.0)
            self.augment = nn.Sequential(change, kornia.augmentation.RandomHorizontalFlip())
            self.criterion = kornia.losses.FocalLoss(alpha=0.5, reduction="mean")

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return self.criterion(self.net(self.augment(x.view(-1, 1, 4, 4)).flatten(1)), y)

    return Augmented()


def flow() -> Project:
    from nflows import distributions, flows, transforms

    class Density(Project):
        def __init__(self) -> None:
            layers = []
            for _ in range(2):
                layers.append(transforms.ReversePermutation(WIDTH))
                layers.append(
                    transforms.MaskedAffineAutoregressiveTransform(WIDTH, hidden_features=32)
                )
            layers.append(transforms.BatchNorm(WIDTH))
            normal = distributions.StandardNormal([WIDTH])
            super().__init__(flows.Flow(transforms.CompositeTransform(layers), normal))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return -self.net.log_prob(x).mean()

    return Density()


def tabnet() -> Project:
    from pytorch_tabnet.tab_network import TabNet

    class Tabular(Project):
        def __init__(self) -> None:
            groups = torch.eye(WIDTH)
            net = TabNet(WIDTH, 4, n_d=4, n_a=4, n_steps=2, group_attention_matrix=groups)
            super().__init__(net)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            found, penalty = self.net(x)
            return F.cross_entropy(found, y) - 1e-3 * penalty

    return Tabular()


def stochastic_ode() -> Project:
    import torchsde

    class Drift(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y)

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return self.spread(y).sigmoid()

    class Sde(Project):
        def __init__(self) -> None:
            super().__init__(Drift())
            self.out = nn.Linear(WIDTH, 4)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            times = torch.tensor([0.0, 0.5])
            noise = torchsde.BrownianInterval(
                0.0, 0.5, tuple(x.shape), entropy=7, levy_area_approximation="space-time"
            )
            found = torchsde.sdeint(self.net, x, times, bm=noise, dt=0.1)
            return F.cross_entropy(self.out(found[-1]), y)

    return Sde()


def contrastive() -> Project:
    from info_nce import InfoNCE

    class Contrastive(Project):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = InfoNCE()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return self.criterion(self.net(x), self.net(x + 0.1 * y[:, None]))

    return Contrastive()


def offline(library: str) -> Callable[[], Project]:
    def make() -> Project:
        project = Project()
        project.library = library
        return project

    return make


PROJECTS: dict[str, tuple[str, str, Callable[[], Project]]] = {
    "dadaptation": ("dadaptation", "DAdaptAdam", optimizer("dadaptation", "DAdaptAdam")),
    "lion": ("lion-pytorch", "Lion", optimizer("lion_pytorch", "Lion", lr=1e-3)),
    "adabelief": (
        "adabelief-pytorch", "AdaBelief",
        optimizer("adabelief_pytorch", "AdaBelief", lr=1e-2, print_change_log=False),
    ),
    "came": ("came-pytorch", "CAME", optimizer("came_pytorch", "CAME", lr=1e-3)),
    "adam_mini": ("adam-mini", "Adam_mini", adam_mini),
    "galore": ("galore-torch", "GaLoreAdamW", optimizer("galore_torch", "GaLoreAdamW", lr=1e-2)),
    "grokadamw": ("grokadamw", "GrokAdamW", optimizer("grokadamw", "GrokAdamW", lr=1e-2)),
    "torch_optimizer": (
        "torch-optimizer", "Yogi", optimizer("torch_optimizer", "Yogi", lr=1e-2)
    ),
    "torch_optimizer_shampoo": (
        "torch-optimizer", "Shampoo", optimizer("torch_optimizer", "Shampoo", lr=1e-2)
    ),
    "adamw4bit": ("torchao", "AdamW4bit", quantised("AdamW4bit")),
    "adamwfp8": ("torchao", "AdamWFp8", quantised("AdamWFp8")),
    "bnb": ("bitsandbytes", "AdamW8bit", optimizer("bitsandbytes.optim", "AdamW8bit", lr=1e-2)),
    "bnb4": ("bitsandbytes", "LoRA on `Linear4bit`", adapted(in_bits("Linear4bit"))),
    "bnb8": (
        "bitsandbytes", "LoRA on `Linear8bitLt`",
        adapted(in_bits("Linear8bitLt", has_fp16_weights=False)),
    ),
    "float8": ("torchao", "`Float8Linear`, emulated", float8),
    "metric_learning": ("pytorch-metric-learning", "ArcFace loss, a miner", metric_learning),
    "ema": ("ema-pytorch", "EMA of the network", ema),
    "torch_ema": ("torch-ema", "averages swapped in at the end", torch_ema),
    "lora": ("loralib", "LoRA layers", lora),
    "lycoris": ("lycoris-lora", "LoKr adapters", lycoris),
    "gpytorch": ("gpytorch", "variational Gaussian process", gpytorch),
    "pyro": ("pyro-ppl", "variational inference, random draws", pyro),
    "graphs": ("torch-geometric", "graph convolutions", graphs),
    "monai": ("monai", "FullyConnectedNet", monai),
    "monai_unet": ("monai", "UNet with batch norm, Dice loss", monai_unet),
    "x_transformers": ("x-transformers", "decoder with rotary positions", transformers_x),
    "quantize": ("vector-quantize-pytorch", "FSQ codes", quantize),
    "neural_ode": ("torchdiffeq", "neural ODE by the adjoint method", neural_ode),
    "adan": ("adan-pytorch", "Adan", optimizer("adan_pytorch", "Adan", lr=1e-2)),
    "optimi": (
        "torch-optimi", "AdamW with Kahan summation",
        optimizer("optimi", "AdamW", lr=1e-2, kahan_sum=True),
    ),
    "attention": (
        "local-attention", "local attention, learned rotary positions", attention
    ),
    "entmax": ("entmax", "sparse losses with a learned exponent", sparse_outputs),
    "kornia": ("kornia", "random augmentations in the step, focal loss", augmented),
    "nflows": ("nflows", "autoregressive flow with batch norm", flow),
    "tabnet": ("pytorch-tabnet", "TabNet", tabnet),
    "torchsde": ("torchsde", "neural SDE", stochastic_ode),
    "info_nce": ("info-nce-pytorch", "InfoNCE loss, two forwards", contrastive),
    "wandb": ("wandb", "WandbLogger, offline", offline("wandb")),
}  # fmt: skip


def logger_of(project: Project, folder: str) -> Any:
    from lightning.pytorch import loggers

    library = getattr(project, "library", "")
    if library == "wandb":
        return loggers.WandbLogger(offline=True, save_dir=folder, log_model=False)
    return False


def train(name: str, strategy: str, folder: str) -> None:
    """Train a project, and let rank 0 store its weights."""
    import lightning_zero  # noqa: F401

    torch.manual_seed(0)
    torch.set_num_threads(1)
    project = PROJECTS[name][2]()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, WIDTH, generator=generator)
    labels = torch.randint(0, 4, (64,), generator=generator)
    trainer = Trainer(
        strategy="ddp_find_unused_parameters_true" if strategy == "ddp" else strategy,
        accelerator="cpu", devices=2, max_epochs=2, logger=logger_of(project, folder),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(project, DataLoader(TensorDataset(rows, labels), batch_size=8))
    if trainer.global_rank == 0:
        found = {**project.state_dict(), **getattr(project, "found", {})}
        torch.save(found, f"{folder}/{strategy}.pt")


def difference(folder: Path, strategy: str) -> str:
    """Return how far a strategy's weights are from DDP's."""
    expected = torch.load(folder / "ddp.pt", weights_only=True)
    found = torch.load(folder / f"{strategy}.pt", weights_only=True)
    if list(found) != list(expected):
        return "other names"
    most, far = 0.0, 0.0
    for key, value in expected.items():
        if value.is_floating_point() and value.numel():
            far = max(far, float((found[key] - value).abs().max()))
            most = max(most, float(value.abs().max()))
    return "0" if far == 0 else f"{far / most:.0e}"


def row(name: str) -> str:
    """Return a project's row of the table."""
    package, what, _ = PROJECTS[name]
    version = importlib.metadata.version(package)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in STRATEGIES:
            command = [sys.executable, __file__, "--train", name, strategy, folder]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if ran.returncode:
                lines = [line for line in ran.stderr.splitlines() if "Error" in line]
                cells.append(f"failed: {(lines or ['?'])[-1][:200]}")
            elif strategy != "ddp":
                is_known = (Path(folder) / "ddp.pt").exists()
                cells.append(difference(Path(folder), strategy) if is_known else "runs")
    return f"| {package} | {version} | {what} | " + " | ".join(cells) + " |"


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(*sys.argv[2:])
        return
    print("| library | version | what | zero1 | zero2 | zero3 |\n|---|---|---|---|---|---|")
    for name in sys.argv[1:] or PROJECTS:
        try:
            importlib.metadata.version(PROJECTS[name][0])
        except importlib.metadata.PackageNotFoundError:
            continue
        print(row(name), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
