"""A small diffusion network and a variational autoencoder, in plain torch. Knows no tracing."""

from __future__ import annotations

import math

import torch
from tests.models.zoo.architecture import Architecture, uniform
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

FAMILY = "diffusion"


class Block(nn.Module):
    """A residual convolution that sees the time."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)])
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(self.dropout(silu(self.norms[1](hidden))))


class Attention(nn.Module):
    """Every place looks at every other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.split = nn.Conv2d(channels, 3 * channels, 1)
        self.join = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.split(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        found = scaled_dot_product_attention(*(part.unsqueeze(1) for part in parts)).squeeze(1)
        return x + self.join(found.transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """Down, a middle with attention, and up with skips; `checkpointing` recomputes the blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.checkpointing = False
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, 16), Block(width, 2 * width, 16)])
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = Attention(2 * width)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = Block(2 * width, width, 16)
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        time = self.time(self.angles(step))
        first = self._block(self.down[0], self.enter(x), time)
        second = self._block(self.down[1], self.shrink(first), time)
        rising = self.grow(self.middle(second))
        return self.leave(self._block(self.up, torch.cat([rising, first], dim=1), time))

    def angles(self, step: Tensor) -> Tensor:
        """Sines and cosines of the step, shape (batch, width)."""
        rates = torch.exp(torch.arange(self.width // 2) * (-math.log(1e4) / (self.width // 2)))
        angles = step[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def _block(self, block: nn.Module, x: Tensor, time: Tensor) -> Tensor:
        if self.checkpointing and self.training:
            return checkpoint(block, x, time, use_reentrant=False)
        return block(x, time)


class Variational(nn.Module):
    """Draws a code from a normal distribution and decodes it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8), nn.ReLU())
        self.shape = nn.Conv2d(8, 8, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 48, 3, padding=1), nn.PixelShuffle(4), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.shape(self.encoder(x)).chunk(2, dim=1)
        code = torch.distributions.Normal(mean, spread.exp()).rsample()
        return self.decoder(code), (mean.square() + spread.exp() - spread).mean()


def denoising_loss(model: nn.Module) -> Tensor:
    """Error of the noise that is found again."""
    noise = torch.randn(2, 3, 16, 16)
    found = model(uniform(5, 2, 3, 16, 16) + noise, torch.tensor([3.0, 70.0]))
    return (found - noise).square().mean()


def reconstruction_loss(model: nn.Module) -> Tensor:
    """Error of a picture after its code, and the code's divergence."""
    image = uniform(5, 2, 3, 16, 16)
    found, divergence = model(image)
    return (found - image).square().mean() + 0.1 * divergence


ARCHITECTURES = [
    Architecture("unet", FAMILY, UNet, denoising_loss),
    Architecture("vae", FAMILY, Variational, reconstruction_loss),
]
