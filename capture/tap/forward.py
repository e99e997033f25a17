"""The tap: SGLang's own EAGLE-3 capture, borrowed for one prefill forward and handed back.

`install` runs after a model is loaded. It resolves the layers through the model's own setter, leaves the model as
SGLang had it (`capture_aux_hidden_states` off, `layers_to_capture` empty) and wraps the inner model's forward. A
forward that holds a request of ours is called with the boundaries in, on every rank, so that collectives stay
matched; TP rank 0 copies the states into the arena and leaves the rest to the writer. Warm-up, health checks and
strangers' requests run through untouched.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from capture import code_hash
from capture.dumps.dump import TapState, make_private
from capture.layers import LayerError, boundaries_of, inner_model, resolve, set_boundaries
from capture.tap.keeper import Keeper
from capture.tap.rank_sums import RankSums
from capture.tap.settings import TapSettings

logger = logging.getLogger("sglang.layertap")


def install(runner: Any, settings: TapSettings) -> Tap:
    """Put the tap into a loaded `ModelRunner`. Raises LayerError, DumpError or OSError, each with its remedy."""
    tap = Tap(runner, settings)
    tap.wrap()
    return tap


class Tap:
    """One rank's part: decides which forwards are captured and, on rank 0, keeps what came out."""

    def __init__(self, runner: Any, settings: TapSettings) -> None:
        import sglang
        from sglang.srt.distributed.parallel_state import get_tp_group

        replicas = replicas_of(runner.server_args)
        if replicas > 1:
            settings = msgspec.structs.replace(settings, replica=this_replica())
            make_private(Path(settings.dump_dir))
        self.settings = settings
        self.inner = inner_model(runner.model)
        self.layers = resolve(runner.model, settings.layers, sglang.__version__)
        self.pre_norm: Any = None
        self.keeper: Keeper | None = None
        rank, model = get_tp_group().rank_in_group, runner.model
        self.rank_sums = RankSums(
            settings.folder, settings.secret, rank, lambda: boundaries_of(model, self.layers.serve_ids)
        )
        if rank == 0:
            device = next(self.inner.parameters()).device
            self.keeper = Keeper(
                settings,
                TapState(
                    code=code_hash(),
                    pid=os.getpid(),
                    sglang=sglang.__version__,
                    model=runner.server_args.model_path,
                    model_class=type(runner.model).__name__,
                    layers=self.layers,
                    gpu=gpu_name(device),
                    ranks=get_tp_group().world_size,
                    replicas=replicas,
                    hidden=runner.model_config.hidden_size,
                    dtype=str(runner.model_config.dtype).removeprefix("torch."),
                    slot_tokens=forward_tokens(runner.server_args, runner.model_config.context_len),
                    reserve=settings.reserve,
                ),
                device,
            )
            logger.info("layertap: the tap is in, drawing %s", self.layers.words())

    def wrap(self) -> None:
        """Wrap the inner model's forward."""
        original = self.inner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            batch = prefill_of(args, kwargs)
            if batch is None:
                return original(*args, **kwargs)
            # Every rank sees the same rids, so all ranks capture or none does.
            ours = [rid.startswith(self.settings.secret + ".") for rid in batch.rids]
            if self.keeper:
                self.keeper.before_forward(batch, ours)
            if not any(ours):
                return original(*args, **kwargs)
            return self.capture(original, batch, args, kwargs)

        self.inner.forward = forward

    def capture(self, original: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's forward with the boundaries in; returns what the caller expects of a plain forward.

        Where no states come of it the requests fail with the reason, and the server goes on.
        """
        if self.inner.layers_to_capture:
            result = original(*args, **kwargs)
            return self._refuse(batch, "SGLang's own hidden state capture is on; start the server without it", result)
        set_boundaries(self.inner, self.layers.boundaries)
        hook = self.inner.norm.register_forward_hook(self._see_norm, with_kwargs=True)
        try:
            result = original(*args, **kwargs)
        finally:
            set_boundaries(self.inner, ())
            hook.remove()
            last, self.pre_norm = self.pre_norm, None
        if not isinstance(result, tuple) or last is None:
            return self._refuse(batch, "the model's forward gave no states of its layers", result)
        final, aux = result
        states = [*self._parts(aux), final, last]
        self.rank_sums.take(batch, states)
        if self.keeper:
            self.keeper.take(batch, states)
        return final

    def _parts(self, aux: Any) -> list[Any]:
        """One state a boundary, out of a list of K or, for models that were moved over in 0.5.23, `[tokens, K * H]`."""
        return list(aux.chunk(len(self.layers.boundaries), dim=-1)) if hasattr(aux, "chunk") else list(aux)

    def _refuse(self, batch: Any, reason: str, result: Any) -> Any:
        if self.keeper:
            self.keeper.refuse(batch, reason)
        return result

    def _see_norm(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # A norm that takes a residual adds to it and gives the sum back; one without has it as its input. Either may
        # lie in a buffer of SGLang's that the next forward fills anew.
        self.pre_norm = (result[1] if isinstance(result, tuple) else args[0] if args else kwargs["x"]).clone()


def prefill_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch that a model's forward is called with; None where it is no prefill of anybody's prompts."""
    batch = kwargs.get("forward_batch") or next((a for a in args if hasattr(a, "forward_mode")), None)
    if batch is None or not batch.forward_mode.is_extend() or batch.extend_seq_lens_cpu is None:
        return None
    return batch if batch.rids else None  # else SGLang's own, to capture a graph or to tune kernels


def gpu_name(device: Any) -> str | None:
    """What a GPU is called; None where the model is on none."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def replicas_of(server_args: Any) -> int:
    """Replicas of a server (`--dp-size`); with attention DP, which has the same option, it is one."""
    attention = getattr(server_args, "enable_dp_attention", False)
    return 1 if attention else int(getattr(server_args, "dp_size", None) or 1)


def this_replica() -> int:
    """Which replica this process belongs to, from 0. Raises LayerError where SGLang does not say it."""
    try:
        from sglang.srt.runtime_context import get_parallel

        replica = get_parallel().dp_rank
    except ImportError:
        replica = None
    if replica is None:
        raise LayerError(
            "this SGLang does not say which replica a process belongs to, 0.5.23 does: start a server for each replica "
            "instead of --dp-size, and extract with --port for each"
        )
    return int(replica)


def forward_tokens(server_args: Any, context_length: int) -> int:
    """Most rows that one forward can hold: the batch budget, or one prompt that is longer."""
    most = [max(server_args.max_prefill_tokens, context_length)]
    most += [limit for limit in (server_args.chunked_prefill_size, server_args.max_total_tokens) if limit and limit > 0]
    return int(min(most))
