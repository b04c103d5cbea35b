"""The LightningModule that the examples train."""

from collections.abc import Callable, Iterable

import lightning as L  # noqa: N812
from torch import Tensor, nn
from torch.optim import Optimizer


class ImageClassifier(L.LightningModule):
    """Cross-entropy training of any network that maps images (N, 3, H, W) to logits (N, classes).

    Args:
        net: the network.
        optimizer: makes the optimizer from the parameters.

    """

    def __init__(self, net: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer(self.parameters())
