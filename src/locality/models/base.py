"""What all models share, timm's too."""

import copy
from typing import Any, Self

from torch import Tensor, nn

from locality.errors import UserError
from locality.layers.grid import Grid
from locality.models.config import to_2tuple


class ImageClassifier(nn.Module):
    """A classifier of images (B, C, H, W), with timm's interface.

    Attributes:
        config: the complete architecture, a frozen dataclass.
        variant: the model name it was created with, or None.
        num_features: width of the final features; also `embed_dim` and `head_hidden_size`.
        num_prefix_tokens: number of class tokens (0, 1) in the final features.
        pretrained_cfg: timm's data configuration; set by `create_model` and `load`.
        preprocessing, classes, problem_type, temperature: those of the file it was loaded from, as
            in `Checkpoint`; saved with it again.
        inherited: classes whose rows of the classifier are those of the loaded weights.
        shortcuts: compute the positional attention of all layers at once, and in `forward` only
            the class token of the last block if the classifier reads no other; set by training and
            `fuse`. Without effect on timm's models.
        fused: whether this is a copy made by `fuse`.
    """

    pretrained_cfg: dict[str, Any]
    forward_features: Any
    forward_head: Any
    forward_intermediates: Any
    get_classifier: Any
    reset_classifier: Any
    prune_intermediate_layers: Any
    set_grad_checkpointing: Any
    no_weight_decay: Any

    def __init__(self, config: Any, num_features: int) -> None:
        super().__init__()
        self.config = config
        self.variant: str | None = None
        self.num_classes: int = config.num_classes
        self.in_chans: int = config.in_chans
        self.num_features = self.embed_dim = self.head_hidden_size = num_features
        self.num_prefix_tokens = int(config.has_class_token)
        self.fused = self.shortcuts = False
        self.preprocessing: Any = None
        self.forget_classifier()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, num_classes)."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → the classifier's input (B, width): features after pooling."""
        return self.forward_head(self.forward_features(x), pre_logits=True)

    @property
    def img_size(self) -> Grid:
        """The native image size (height, width)."""
        return to_2tuple(self.config.img_size)

    @property
    def global_pool(self) -> str | None:
        """The pooling, which timm saves with the weights."""
        return getattr(self.config, "global_pool", None)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """One entry per feature map: its width (`num_chs`), `reduction` in pixels, and `module`."""
        raise NotImplementedError

    def forget_classifier(self) -> None:
        """Forget what was known of a classifier that is replaced."""
        self.inherited: list[int] = []
        self.classes: tuple[str, ...] | None = None
        self.problem_type: Any = None
        self.temperature = 1.0

    def layer_ids(self) -> dict[str, int]:
        """Parameter name → layer index in timm's convention, starting with the stem."""
        raise NotImplementedError

    def unused_parameters(self) -> set[str]:
        """Names of trainable parameters that by design do not affect the output."""
        return set()

    def fuse(self) -> Self:
        """A copy for evaluation, faster if the model knows how; it cannot train."""
        fused = copy.deepcopy(self).eval().requires_grad_(False)
        fused.fused = True
        return fused

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As torch's.

        Raises:
            UserError: for a fused model, whose layers are merged.
        """
        if self.fused:
            raise UserError("load weights into a model before it is fused")
        return super().load_state_dict(*arguments, **options)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode.

        Raises:
            UserError: for training mode of a fused model.
        """
        if mode and self.fused:
            raise UserError("a fused model cannot train; train the model it was fused from")
        return super().train(mode)
