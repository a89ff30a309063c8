"""Vision: crops to image features. SigLIP, 2x2 pooling, HD transform and projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Phi4MultimodalConfig
from transformers.models.phi4_multimodal.configuration_phi4_multimodal import Phi4MultimodalVisionConfig
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalVisionEncoderLayer

from .attention import with_masked_attention
from .runtime_checks import OUT_OF_RANGE, count_rows
from .stack import LayerStack


__all__ = ["VisionEncoder", "num_vision_layers", "position_id_table"]


def num_vision_layers(config: Phi4MultimodalVisionConfig) -> int:
    """How many SigLIP layers the features need; `feature_layer` counts hidden states, the input too."""
    layer = config.feature_layer
    return layer if layer >= 0 else config.num_hidden_layers + 1 + layer


def position_id_table(grid: int) -> Tensor:
    """The position bucket of row r (or column) when n of `grid` are valid, as int64 (grid + 1, grid); 0
    beyond n.

    Follows `Phi4MultimodalVisionEmbeddings.forward` step by step: its float32 fractions don't fall where
    exact ones would, so the values are computed by the same calls.
    """
    with torch.device("cpu"):  # values are needed even where the module is built on meta
        boundaries = torch.arange(1 / grid, 1.0, 1 / grid)
        table = torch.zeros(grid + 1, grid, dtype=torch.int64)
        for valid in range(1, grid + 1):
            fractions = torch.arange(0, 1 - 1e-6, (1 / torch.tensor(valid)).item())
            table[valid, :valid] = torch.bucketize(fractions, boundaries, right=True)
    return table


class VisionLayer(Phi4MultimodalVisionEncoderLayer):
    """transformers' SigLIP layer with the arguments of a `LayerStack`."""

    def forward(
        self, hidden: Tensor, mask: Tensor
    ) -> Tensor:  # (crops, patches, C), bool (crops, 1, 1, patches)
        return super().forward(hidden, attention_mask=mask)


class VisionEmbeddings(nn.Module):
    """Patches to vectors, with positions bucketed by how many patches of the crop are valid."""

    position_id_table: Tensor

    def __init__(self, config: Phi4MultimodalVisionConfig) -> None:
        super().__init__()
        self.grid = config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(self.grid**2, config.hidden_size)
        self.register_buffer("position_id_table", position_id_table(self.grid), persistent=False)

    def forward(self, pixel_values: Tensor, mask: Tensor) -> Tensor:  # (crops, 3, h, w), bool (crops, g, g)
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)  # (crops, g * g, C)
        rows = self.position_id_table[mask[:, :, 0].sum(1)]  # (crops, g)
        columns = self.position_id_table[mask[:, 0, :].sum(1)]
        position_ids = rows[:, :, None] * self.grid + columns[:, None, :]
        position_ids = torch.where(mask, position_ids, 0).flatten(1)
        return patches + self.position_embedding(position_ids)


class ImageProcessor(nn.Module):
    """SigLIP up to the layer whose features are used, without later layers, final norm and pooling head."""

    def __init__(self, config: Phi4MultimodalVisionConfig) -> None:
        super().__init__()
        config = with_masked_attention(config)
        self.embeddings = VisionEmbeddings(config)
        layers = LayerStack(VisionLayer(config) for _ in range(num_vision_layers(config)))
        self.encoder = nn.ModuleDict({"layers": layers})  # the checkpoint's names have this level

    def forward(self, pixel_values: Tensor, mask: Tensor) -> Tensor:  # -> (crops, g * g, C)
        hidden = self.embeddings(pixel_values, mask)
        hidden, _ = self.encoder["layers"](hidden, shared=(mask.flatten(1)[:, None, None, :],))
        return hidden


class VisionEncoder(nn.Module):
    """`vision.onnx`: see docs/contract.md. Follows `Phi4MultimodalImageEmbedding` of transformers, without
    its loop.

    Each output token is one row of a table that holds every crop's tokens and the two separators; which row
    follows from the token's position by integer arithmetic, so that any mix of grids and paddings is one
    Gather.
    """

    def __init__(self, config: Phi4MultimodalConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.crop_size = vision.crop_size
        self.base = vision.image_size // vision.patch_size // 2  # tokens per side of a crop after pooling
        self.img_processor = ImageProcessor(vision)
        self.img_projection_up = nn.Linear(vision.hidden_size, config.hidden_size)
        self.img_projection_down = nn.Linear(config.hidden_size, config.hidden_size)
        self.global_img_feature_extensor = nn.Parameter(torch.zeros([1, 1, vision.hidden_size]))
        self.sub_img_feature_extensor = nn.Parameter(torch.zeros([1, 1, 1, vision.hidden_size]))

    def forward(
        self, pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor
    ) -> tuple[Tensor]:
        """Image features of all images, one after another.

        Args:
            pixel_values: F (batch, 3, crop, crop).
            image_sizes: int64 (num_images, 2), height and width after padding; (0, 2): each item is an image.
            image_attention_mask: bool (mask_rows, g, g), valid patches per crop; missing rows are all valid.

        Returns:
            F (num_image_tokens, hidden).
        """
        everything = torch.ones(
            pixel_values.shape[0],
            *image_attention_mask.shape[1:],
            dtype=torch.bool,
            device=pixel_values.device,
        )
        mask = torch.cat([image_attention_mask, everything])[: pixel_values.shape[0]]
        too_many_rows = count_rows(image_attention_mask) > count_rows(pixel_values)

        hidden = self.img_processor(pixel_values, mask)
        hidden = hidden.view(-1, 2 * self.base, 2 * self.base, hidden.shape[-1])
        pooled = nn.functional.avg_pool2d(hidden.permute(0, 3, 1, 2), kernel_size=2, stride=2)
        crops = pooled.permute(0, 2, 3, 1).flatten(0, 2)  # (batch * base * base, C)
        table = torch.cat(
            [
                crops,
                self.sub_img_feature_extensor.flatten(0, 2),
                self.global_img_feature_extensor.flatten(0, 1),
            ]
        )
        rows = self.token_rows(image_sizes, mask, too_many_rows)
        tokens = table.index_select(0, rows)
        tokens = self.img_projection_up(tokens)
        tokens = nn.functional.gelu(tokens)
        return (self.img_projection_down(tokens),)

    def token_rows(self, image_sizes: Tensor, mask: Tensor, bad: Tensor) -> Tensor:
        """For every output token its row in [all crops' tokens; sub_GN; glb_GN], as int64
        (num_image_tokens,).

        Images with sizes (hd) come first, then every batch item as an image of its own; the latter have no
        tokens when there is any image of the former kind. One kind of arithmetic serves both.
        """
        base = self.base
        num_crops = count_rows(mask)
        crop_ids = torch.ones_like(mask[:, 0, 0], dtype=torch.int64).cumsum(0) - 1  # (batch,)
        grid = image_sizes // self.crop_size
        height, width = grid[:, 0], grid[:, 1]
        has_hd = count_rows(image_sizes) > 0

        wrong_size = (image_sizes <= 0) | (image_sizes % self.crop_size != 0)
        hd_crops = 1 + height * width
        bad = bad | (wrong_size.sum() > 0) | (has_hd & (hd_crops.sum() != num_crops))
        first_crop = hd_crops.cumsum(0) - hd_crops  # the crop that is an image's global view

        # Valid tokens per crop: rows in its first column, columns in its first row (the mask of every second
        # patch).
        valid_rows = mask[:, ::2, 0].sum(1)
        valid_columns = mask[:, 0, ::2].sum(1)
        sub_id = (
            crop_ids[None] - first_crop[:, None] - 1
        )  # (num_images, batch), an image's sub-crops are 0 .. h*w-1
        own = (sub_id >= 0) & (sub_id < (height * width)[:, None])
        safe_width = width.clamp(min=1)[:, None]
        useful_height = torch.where(own & (sub_id % safe_width == 0), valid_rows[None], 0).sum(1)
        useful_width = torch.where(own & (sub_id // safe_width == 0), valid_columns[None], 0).sum(1)

        plain = torch.ones_like(crop_ids)
        global_crop = torch.cat([first_crop, crop_ids])
        first_sub = torch.cat([first_crop + 1, crop_ids])  # a plain image's only sub-crop is its global view
        columns_of_crops = torch.cat([width, plain])
        useful_height = torch.cat([useful_height, valid_rows])
        useful_width = torch.cat([useful_width, valid_columns])

        sub_tokens = useful_height * (useful_width + 1)  # every row ends with sub_GN
        counts = sub_tokens + 1 + base * (base + 1)
        is_hd = torch.cat([torch.ones_like(height), torch.zeros_like(crop_ids)]) > 0
        counts = torch.where(is_hd == has_hd, counts, 0)
        # Nothing may be allocated by sizes that are wrong: they get one token, whose row does not exist.
        total_count = torch.where(bad, 1, counts.sum())
        total = total_count.item()
        torch._check(total >= 0)

        starts = counts.cumsum(0) - counts
        position = torch.arange(total, device=mask.device)
        image = (position[:, None] >= starts[None]).sum(1) - 1
        offset = position - starts[image]

        line = useful_width[image] + 1
        sub_row, sub_column = offset // line, offset % line
        sub_crop = first_sub[image] + (sub_row // base) * columns_of_crops[image] + sub_column // base
        sub_token = (sub_crop * base + sub_row % base) * base + sub_column % base

        global_offset = offset - sub_tokens[image] - 1
        global_row, global_column = global_offset // (base + 1), global_offset % (base + 1)
        global_token = (global_crop[image] * base + global_row) * base + global_column

        sub_separator = num_crops * base * base
        in_sub = offset < sub_tokens[image]
        row = torch.where(in_sub, sub_token, global_token)
        ends_line = (in_sub & (sub_column == useful_width[image])) | (~in_sub & (global_column == base))
        row = torch.where(ends_line, sub_separator, row)
        row = torch.where(global_offset == -1, sub_separator + 1, row)
        return torch.where(bad, OUT_OF_RANGE, row)
