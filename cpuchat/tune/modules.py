"""Times the CPU modules of the engine that are worth it on this CPU, for a tensor type: synthetic layers, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import Interrupted, MeasureFailed, from_code
from cpuchat.bench.cost_probe import LAYERS, probe_folder
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.cpu_modules import AUTO, TimedModules
from cpuchat.models.synthetic.model import write_model
from cpuchat.protocol.messages import Failed, LoadOptions, Measure
from cpuchat.tune.halving import Halving, HalvingResult, Speed
from cpuchat.tune.trial import DEFAULT_PROMPT_SHARE

_N_LAYER = 3  # of synthetic weights, more than caches of most cores hold
_STEPS, _PROMPT = 16, 128  # tokens of a measurement
_REPEATS = 2  # of which the fastest counts: what interrupts one only slows it down
_LONGER = 1.5  # factor of the tokens from one rung to the next


class ModuleProbe:
    """Finds the fastest module, each in a worker of its own. `run` once; after `stop` it raises Interrupted.

    Args:
        kind: a type of weights, such as "Q4_K".
        modules: those of `EngineInfo`, the one with the highest score first.
    """

    def __init__(self, kind: str, spec: PlacementSpec, modules: Sequence[str]) -> None:
        self._kind, self._spec = kind, spec
        self._backends = {name: LocalBackend() for name in modules}
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        for backend in self._backends.values():
            backend.kill()

    async def run(self) -> TimedModules | None:
        """Return the fastest module; None where other programs ran.

        Raises:
            Interrupted: stopped.
            CpuchatError: no synthetic weights of this type can be made or loaded.
        """
        usual, *rivals = self._backends
        try:
            with probe_folder() as folder:
                file, shape = folder / "modules.gguf", msgspec.structs.replace(LAYERS, n_layer=_N_LAYER)
                await asyncio.to_thread(write_model, file, shape, self._kind, cancelled=lambda: self._stopped)
                for name, backend in self._backends.items():
                    options = LoadOptions(n_ctx=512, cpu_module=name)
                    await load_to_measure(backend, file, options, self._spec, lambda: self._stopped)
            finding = await Halving(self._measure, DEFAULT_PROMPT_SHARE).run(usual, rivals)
        except OSError as error:
            raise MeasureFailed(f"The probe's model cannot be written: {error.strerror}.") from None
        finally:
            for backend in self._backends.values():
                await backend.close()
        return timed(usual, rivals, finding)

    async def _measure(self, name: str, rung: int) -> Speed:
        factor = _LONGER ** (rung - 1)
        found = [await self._rates(self._backends[name], factor) for _ in range(_REPEATS)]
        return Speed(prefill=max(one.prefill for one in found), decode=(max(one.mean_decode for one in found),))

    async def _rates(self, backend: LocalBackend, factor: float) -> Speed:
        n_gen, n_prompt = round(factor * _STEPS), round(factor * _PROMPT)
        decode = n_gen / await self._seconds(backend, Measure(n_prompt=0, n_gen=n_gen))
        prefill = n_prompt / await self._seconds(backend, Measure(n_prompt=n_prompt, n_gen=0))
        return Speed(prefill=prefill, decode=(decode,))

    async def _seconds(self, backend: LocalBackend, what: Measure) -> float:
        found = await backend.measure(what)
        if self._stopped:
            raise Interrupted("Stopped.")
        if isinstance(found, Failed):
            raise from_code(found.code, found.message, found.hint)
        return found.seconds


def timed(usual: str, rivals: Sequence[str], finding: HalvingResult[str]) -> TimedModules | None:
    """Return what a search among `rivals` of the `usual` module found; None where it decided nothing."""
    best, ratio = finding.best, finding.ratio
    if best is None or ratio is None or finding.verdict in ("busy", "failed"):
        return None
    return TimedModules(
        module=best if finding.verdict == "faster" else AUTO,
        usual=usual,
        of=(usual, *rivals),
        rival=best,
        decode=ratio.decode - 1,
        prefill=ratio.prefill - 1,
    )
