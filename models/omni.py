"""Omni models: encoders of media before a language model, each part a module that works on its own."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from models.decoder import Decoder
from models.stacks import Deepstack
from omnijax import sharding
from omnijax.batch import Batch
from omnijax.errors import UserError
from omnijax.nn.merge import merge
from omnijax.objectives import Mean, Outputs
from omnijax.parameters import Parameters

BACKBONE = "backbone."


class OmniModel(nnx.Module):
    """`encoders` read the media of their names; what they make stands in the row where the batch's slots say.

    An encoder gives features [B, M, embed]; one with a `with_deepstack` gives those and [layers, B, M, embed] too, for
    the layers of the backbone's first stack.
    """

    def __init__(self, config: Any, *, encoders: Mapping[str, nnx.Module], backbone: Decoder):
        self.encoders, self.backbone, self.config = nnx.Dict(encoders), backbone, config

    def __call__(self, batch: Batch) -> Outputs:
        """As the backbone. A batch without the arrays of a modality is one without its media.

        Raises `UserError` for media that no encoder reads.
        """
        if unread := sorted(set(batch.media) - set(self.encoders)):
            raise UserError(f"no encoder reads media {unread[0]!r}; there are {', '.join(self.encoders)}")
        x, deepstack = self.backbone.embed_tokens(batch.tokens), None
        for name in sorted(batch.media):
            encoder, slots = self.encoders[name], batch.slots[name]
            with sharding.part(f"encoders.{name}"):
                if hasattr(encoder, "with_deepstack"):
                    features, deep = encoder.with_deepstack(batch.media[name])
                    deepstack = Deepstack(deep, slots)
                else:
                    features = encoder(batch.media[name])
            x = merge(x, features, slots)
        return self.backbone.forward(x, batch, deepstack)

    def after_step(self, params: Parameters, metrics: Mapping[str, Mean]) -> Parameters:
        """The parameters that change by what a step counted: those of the backbone."""
        own = {path.removeprefix(BACKBONE): x for path, x in params.items() if path.startswith(BACKBONE)}
        changed = self.backbone.after_step(own, metrics)
        return params | {BACKBONE + path: x for path, x in changed.items()}

    def logits(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S V"]:
        """float32 logits of the next token; for sampling and tests, as training never holds them all at once."""
        return self.backbone.logits(hidden)
