"""The original's image path: SigLIP, pooling, arrangement of crops with separators, projection.

Letters: N images, C crops per image (the global one first, then h*w sub-crops, then padding), D the tower's width,
H the decoder's width.  Each step is a method, so that a test can replace one by a deliberate mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from phi4mm_export.oracle.weights import Weights, lowest, softmax
from phi4mm_export.spec.model import IMAGE_SIZE, PATCH_SIZE, PATCHES_PER_SIDE, VisionDims

PREFIX = "model.embed_tokens_extend.image_embed."
POOLED = PATCHES_PER_SIDE // 2


class Vision:
    """pixel values -> image features."""

    def __init__(self, dims: VisionDims, weights: Weights) -> None:
        self.dims, self.weights = dims, weights

    def __call__(self, pixel_values: Tensor, image_attention_mask: Tensor, image_sizes: Tensor) -> Tensor:
        """Features of all images, one image after another.

        pixel_values [N, C, 3, 448, 448] float; image_attention_mask [N, C, 32, 32], nonzero = real patch;
        image_sizes int64 [N, 2], pixels of the padded image (448*h, 448*w).  Returns [tokens, H].
        """
        images, crops = pixel_values.shape[:2]
        real = image_attention_mask.to(torch.bool)
        towers = torch.stack([self.tower(pixel_values[i], real[i]) for i in range(images)])
        pooled = self.pool(towers.flatten(0, 1)).unflatten(0, (images, crops))
        grids = [(int(h) // IMAGE_SIZE, int(w) // IMAGE_SIZE) for h, w in image_sizes]
        return self.project(torch.cat([self.arrange(pooled[i], real[i], grid) for i, grid in enumerate(grids)]))

    def tower(self, pixels: Tensor, real: Tensor) -> Tensor:
        """SigLIP on the crops of one image: [C, 3, 448, 448], bool [C, 32, 32] -> [C, 1024, D] (feature layer -2)."""
        name = f"{PREFIX}img_processor.embeddings."
        patches = functional.conv2d(
            pixels.to(self.weights.dtype),
            self.weights(f"{name}patch_embedding.weight"),
            self.weights(f"{name}patch_embedding.bias"),
            stride=PATCH_SIZE,
        )
        x = patches.flatten(2).transpose(1, 2)
        x = x + self.weights(f"{name}position_embedding.weight")[self.position_ids(real)]
        keys = self.attended(real)
        for layer in range(self.layers()):
            x = self.layer(x, keys, f"{PREFIX}img_processor.encoder.layers.{layer}.")
        return self.last(x)

    def layers(self) -> int:
        """How many stored layers run."""
        return self.dims.used_layers

    def last(self, x: Tensor) -> Tensor:
        """What follows the last layer: nothing (post_layernorm is stored and unused)."""
        return x

    def position_ids(self, real: Tensor) -> Tensor:
        """NaViT position ids int64 [C, 1024]: fractions of the real rows and columns, bucketed in float32."""
        side = PATCHES_PER_SIDE
        edges = torch.arange(1 / side, 1.0, 1 / side)
        ids = torch.zeros(real.shape[0], side * side, dtype=torch.long)
        for crop in range(real.shape[0]):
            rows, columns = real[crop, :, 0].sum(), real[crop, 0].sum()
            row = torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / rows), edges, right=True)
            column = torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / columns), edges, right=True)
            ids[crop][real[crop].reshape(-1)] = (row[:, None] * side + column).flatten()
        return ids

    def attended(self, real: Tensor) -> Tensor:
        """Which patches every query of a crop may attend to: bool [C, 1024]."""
        return real.flatten(1)

    def activation(self, x: Tensor) -> Tensor:
        """The MLP's activation inside SigLIP: GELU by tanh."""
        return functional.gelu(x, approximate="tanh")

    def layer(self, x: Tensor, keys: Tensor, name: str) -> Tensor:
        """One pre-norm encoder layer: [C, 1024, D] -> the same."""
        crops, patches, width = x.shape
        heads, eps = self.dims.num_heads, self.dims.eps
        y = self.weights.layer_norm(x, f"{name}layer_norm1", eps)
        q, k, v = (
            self.weights.linear(y, f"{name}self_attn.{part}_proj").view(crops, patches, heads, -1).transpose(1, 2)
            for part in "qkv"
        )
        mixed = []
        for crop in range(crops):  # one crop at a time: the scores of one take 16 * 1024 * 1024 values
            scores = q[crop] @ k[crop].transpose(-1, -2) * (width // heads) ** -0.5
            mixed.append(softmax(scores.masked_fill(~keys[crop], lowest(scores.dtype))) @ v[crop])
        attention = torch.stack(mixed).transpose(1, 2).reshape(crops, patches, width)
        x = x + self.weights.linear(attention, f"{name}self_attn.out_proj")
        y = self.weights.layer_norm(x, f"{name}layer_norm2", eps)
        return x + self.weights.linear(self.activation(self.weights.linear(y, f"{name}mlp.fc1")), f"{name}mlp.fc2")

    def pool(self, x: Tensor) -> Tensor:
        """2x2 average pooling: [crops, 1024, D] -> [crops, 16, 16, D]."""
        grid = x.unflatten(1, (PATCHES_PER_SIDE, PATCHES_PER_SIDE)).permute(0, 3, 1, 2)
        return functional.avg_pool2d(grid, 2, 2).permute(0, 2, 3, 1)

    def arrange(self, pooled: Tensor, real: Tensor, grid: tuple[int, int]) -> Tensor:
        """One image's vectors in order, separators included: [C, 16, 16, D], bool [C, 32, 32] -> [tokens, D]."""
        h, w = grid
        width = pooled.shape[-1]
        row_end = self.weights(f"{PREFIX}sub_GN").reshape(1, 1, width)
        middle = self.weights(f"{PREFIX}glb_GN").reshape(1, width)
        whole = torch.cat([pooled[0], row_end.expand(POOLED, 1, width)], 1).reshape(-1, width)
        tiles = pooled[1 : 1 + h * w].view(h, w, POOLED, POOLED, width).transpose(1, 2)
        tiles = tiles.reshape(h * POOLED, w * POOLED, width)
        rows, columns = self.real_size(real[1 : 1 + h * w], grid)
        tiles = torch.cat([tiles[:rows, :columns], row_end.expand(rows, 1, width)], 1).reshape(-1, width)
        return torch.cat(self.order(tiles, middle, whole))

    def real_size(self, real: Tensor, grid: tuple[int, int]) -> tuple[int, int]:
        """Pooled rows and columns of an image that hold real patches: bool [h*w, 32, 32] -> (rows, columns)."""
        h, w = grid
        mask = real[:, ::2, ::2].reshape(h, w, POOLED, POOLED).transpose(1, 2).reshape(h * POOLED, w * POOLED)
        return int(mask[:, 0].sum()), int(mask[0].sum())

    def order(self, tiles: Tensor, middle: Tensor, whole: Tensor) -> list[Tensor]:
        """`hd_transform_order: sub_glb`: the tiles, the separator, the global view."""
        return [tiles, middle, whole]

    def projection_activation(self, x: Tensor) -> Tensor:
        """The projection's activation: exact GELU."""
        return functional.gelu(x)

    def project(self, x: Tensor) -> Tensor:
        """[tokens, D] -> [tokens, H]."""
        x = self.projection_activation(self.weights.linear(x, f"{PREFIX}img_projection.0"))
        return self.weights.linear(x, f"{PREFIX}img_projection.2")
