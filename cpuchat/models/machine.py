"""This machine as a model uses it: the memory that it offers, what passes cost here, and settings found by tuning.

Measures nothing. Settings that tuning found to be faster for a model belong to the model's content and the machine with
the CPUs that this process may use: with another of these they are not used. With another build of the engine they are,
and marked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, ModelUnsupported, UsageError
from cpuchat.config.settings import Changes, Settings, value_of, with_changes
from cpuchat.costs.model import N_PAST, CostProfile, compute_ceiling, scaled
from cpuchat.costs.usual import cpu_of, usual, usual_profile
from cpuchat.hardware.memory import available_within, total_bytes
from cpuchat.hardware.numa.mempolicy import Policy
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.measure import store
from cpuchat.measure.peak import expected
from cpuchat.measure.subject import Subject
from cpuchat.models import kernels
from cpuchat.models.costs import CostLog, Costs, factor_of
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.file_names import engine_fingerprint, file_fingerprint
from cpuchat.models.fit import PROCESS_BYTES, check_fit, plan_memory, required_memory
from cpuchat.models.gguf.header import model_size, read_model
from cpuchat.models.ollama import file_name
from cpuchat.models.support import check_supported, scalar_types
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry.roofline import Reach
from cpuchat.telemetry.units import bandwidth


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes, `peak` read bandwidth in bytes per second (0: the cores of the settings are not there, and
    `peak_source` says so); `at_least`, `estimated` and `least` as of `Peak`.

    `available` is what a model may take, `total` what there is. `profile` is what passes cost on the cores in use, and
    `source` what that rests on; None without any cores. `factors`: by how much longer passes of some models take, as of
    `factor_of`. `cache_bytes` are the L3 caches of these cores (0: not known). `fitted`: the profile follows measured
    passes, not what is usual of such cores; `probed`: those of a probe are among them, of the tensor types
    `measured_types` on these cores. `scalar_types` as of `support`."""

    available: int
    total: int
    peak: float = 0.0
    peak_source: str = ""
    at_least: bool = False
    estimated: bool = False
    least: float = 0.0
    profile: CostProfile | None = None
    source: str = ""
    factors: dict[str, float] = {}
    fitted: bool = False
    probed: bool = False
    measured_types: frozenset[str] = frozenset()
    cache_bytes: int = 0
    scalar_types: frozenset[str] = frozenset()

    @property
    def rough(self) -> bool:
        """Return whether speeds may be wrong by `telemetry.machine.ROUGH`: they follow from a bandwidth that is not
        known well."""
        return (self.estimated or self.at_least) and not self.fitted

    def factor_of(self, model: Path) -> float:
        """Return by how much longer the passes of a model take than by the profile: chats with it measured that; 1 for
        others."""
        return factor_of(self.factors, model)


def this_machine(settings: Settings, *, loaded: ModelInfo | None = None, root: Path = Path("/")) -> Machine:
    """Read the machine as it is now, with the cores and the memory policy of the settings, in a few milliseconds.
    `loaded`: a model to be counted as unloaded; its header is read. `root` replaces `/` in tests."""
    topology = read_topology(root)
    cpus, policy, problem = _place(settings, topology)
    peak = expected(cpus, policy.words, root=root) if policy is not None else None
    available, total = _memory(policy, settings, loaded, root)
    machine = Machine(
        available=available,
        total=total,
        peak_source=problem,
        cache_bytes=topology.l3_bytes(cpus),
        scalar_types=scalar_types(engine_cpu(settings.engine.cpu_module, root)),
    )
    if peak is None:
        return machine
    share = 100 * usual().decode["here"].value
    source = f"{share:.0f} % of {bandwidth(peak.bytes_per_s)}, {peak.source}; passes not measured"
    costs = costs_here(cpus, policy.words if policy is not None else "", peak.bytes_per_s, root)
    return msgspec.structs.replace(
        machine,
        peak=peak.bytes_per_s,
        peak_source=peak.source,
        at_least=peak.at_least,
        estimated=peak.estimated,
        least=peak.least,
        profile=costs.profile,
        source=costs.source or source,
        factors=costs.factors,
        fitted=bool(costs.source),
        probed=costs.probed,
        measured_types=costs.types,
    )


def memory_here(settings: Settings, loaded: ModelInfo | None = None) -> int:
    """Return the bytes that a model may take, with the memory policy of the settings and `loaded` unloaded."""
    return _memory(_place(settings, read_topology())[1], settings, loaded, Path("/"))[0]


def _memory(policy: Policy | None, settings: Settings, loaded: ModelInfo | None, root: Path) -> tuple[int, int]:
    """Return the available and the total memory."""
    total, available = total_bytes(root), available_within(policy.bound if policy is not None else (), root)
    freed = unloaded_bytes(loaded, settings.load_options()) if loaded is not None else 0
    return min(available + freed, total), total


def cost_log(settings: Settings, root: Path = Path("/")) -> CostLog | None:
    """Return what is known of passes on the cores of the settings; None where these are not there."""
    cpus, policy, _ = _place(settings, read_topology(root))
    return CostLog(cpus, policy.words, root) if cpus and policy is not None else None


def costs_here(cpus: Sequence[int], memory: str, bandwidth: float, root: Path = Path("/")) -> Costs:
    """Return what passes cost on cores that read `bandwidth` bytes per second together."""
    return CostLog(cpus, memory, root).costs(usual_here(cpus, bandwidth, root))


def usual_here(cpus: Sequence[int], bandwidth: float, root: Path = Path("/")) -> CostProfile:
    """Return what passes cost on usual cores of this kind that read `bandwidth` bytes per second together, with the
    products that loads measured to choose kernels."""
    topology = read_topology(root)
    cpu = engine_cpu(root=root)
    profile = usual_profile(
        cpu_of(cpu.features),
        len(cpus),
        usual().decode["here"].value * bandwidth,
        l3_bytes=topology.l3_bytes(cpus),
        own=kernels.chosen_types(cpu, cpus=cpus),
    )
    known = {one.type: one for one in profile.products}
    for kind, one in kernels.ProductLog(cpus).read().items():
        if not one.disturbed:
            known[kind] = one.cpuchat if one.is_chosen else one.llama_cpp
    return msgspec.structs.replace(profile, products=tuple(known.values()))


def reach_of(model: ModelInfo, memory: str = "") -> Reach:
    """Return what the cores of a loaded model reach with it: the newest peak, and by the cost model, computing
    in passes as long as micro-batches; not the latter before any probe. `memory`: the worker's memory policy, in the
    words of `mempolicy`."""
    peak = expected(model.cpus, memory)
    costs = costs_here(model.cpus, memory, peak.bytes_per_s) if peak is not None else None
    if costs is None or not costs.probed or model.work is None:
        return Reach(peak=peak)
    profile = scaled(costs.profile, 1 / factor_of(costs.factors, Path(model.path)))
    compute, read = compute_ceiling(profile, model.work, N_PAST), profile.read_rate(model.work.weight_bytes)
    return Reach(peak=peak, compute_tok_s=compute, read_bytes_per_s=read)


def require_loadable(path: Path, settings: Settings, loaded: ModelInfo | None = None) -> None:
    """Check by its header that `path` can be loaded in the place of `loaded`, before that is unloaded. Raises
    ModelNotFound, ModelDamaged, ModelUnsupported, DoesNotFit: it cannot."""
    header, options = read_model(path), settings.load_options()
    if header.is_projector or not header.tensors:
        raise ModelUnsupported(f"{file_name(path)} is {header.other}.", "Choose a language model.")
    check_supported(header)
    available = memory_here(settings, loaded)
    check_fit(plan_memory(header, options, available)[0], available, header, options)


def unloaded_bytes(loaded: ModelInfo, options: LoadOptions) -> int:
    """Return the bytes that become available when `loaded`, with these options, is unloaded and its process stays.

    Not the pages of its file: the system counts those as available while they are in use, unless they are locked."""
    try:
        need = required_memory(read_model(Path(loaded.path)), options, loaded.n_ctx)
    except CpuchatError:  # its file no longer exists
        return loaded.kv_size
    private = need.compute - PROCESS_BYTES + need.repack + need.kv
    if options.load_mode == "mmap" and not options.mlock:
        return private
    return private + need.weights - need.reclaimable


def _place(settings: Settings, topology: Topology) -> tuple[tuple[int, ...], Policy | None, str]:
    """Return the CPUs that would compute and the memory policy, or what is wrong with the settings."""
    try:
        placement = place(topology, PlacementSpec.of(settings))
        return placement.cpus, placement.memory_policy, ""
    except UsageError as error:
        return (), None, str(error)


GROUPS: Final = (
    ("engine.threads", "engine.cores"),
    ("engine.memory_policy",),
    ("engine.flash_attn", "engine.cache_type_k", "engine.cache_type_v"),
    ("engine.ubatch", "engine.batch"),
    ("engine.cpu_module",),
    ("engine.kernels",),
    ("speculation.drafters", "speculation.depth", "speculation.draft_model"),
)
"""Settings that only make sense together."""
_PLACEMENT: Final = ("engine.threads", "engine.cores", "engine.memory_policy")
_DEFAULTS: Final = Settings()
MEASURED: Final = ("engine.threads", "engine.cores")
"""Settings that are measured even if the user set them: nobody knows in advance how many threads are best."""


class TunedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One adopted choice: the settings that it changes, in words, and what it gained (0.05: 5 % faster)."""

    keys: tuple[str, ...]
    words: str
    decode: float
    prefill: float


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """Tuned settings of one model. `changes` as `settings.update` takes them; `replaced`: values by key
    that the user had set when they were measured, with the build `engine`."""

    model: str
    changes: dict[str, dict[str, Any]]
    replaced: dict[str, Any] = {}
    choices: tuple[TunedChoice, ...] = ()
    engine: str = msgspec.field(default_factory=engine_fingerprint)

    @property
    def is_outdated(self) -> bool:
        """Return whether it was measured with another build of the engine."""
        return self.engine != engine_fingerprint()

    def applied_to(self, chosen: Settings) -> Settings:
        """Return a copy of `chosen` in which tuned values replace defaults. What the user set wins, with all that
        belongs to it, unless that is `replaced`: it was measured and others were faster."""
        changes: Changes = {}
        for group in GROUPS:
            if all(value_of(chosen, key) == self.replaced.get(key) for key in set_keys(chosen, group)):
                for section, name in (key.split(".") for key in group):
                    if name in self.changes.get(section, {}):
                        changes.setdefault(section, {})[name] = self.changes[section][name]
        return with_changes(chosen, changes)

    def choice_of(self, key: str) -> TunedChoice | None:
        """Return the choice that changed a setting, or what belongs to it."""
        group = next((group for group in GROUPS if key in group), ())
        return next((one for one in self.choices if {*one.keys} & {*group}), None)


def set_keys(chosen: Settings, group: Iterable[str]) -> list[str]:
    """Return those of a group, and of what it depends on, that the user set to something else than the default."""
    keys = [*group]
    if {*keys} & {*_PLACEMENT}:
        keys = [*dict.fromkeys((*keys, *_PLACEMENT))]
    return [key for key in keys if value_of(chosen, key) != value_of(_DEFAULTS, key)]


def differences(before: Settings, after: Settings) -> Changes:
    """Return the settings of `GROUPS` that differ, with their values after."""
    changes: Changes = {}
    for key in (key for group in GROUPS for key in group):
        if (value := value_of(after, key)) != value_of(before, key):
            section, _, name = key.partition(".")
            changes.setdefault(section, {})[name] = value
    return changes


_TUNED: Final = "tuned settings"


def find_tuned(model: Path) -> Tuned | None:
    """Return what was found for this model and machine; None where nothing was, or it is not valid. Reads a sample of
    one as large as a tuned model: call it in a thread."""
    entries = store.find_all(_TUNED, Tuned)
    try:
        size = model_size(model) if entries else 0
        if not any(one.subject.settings.get("bytes") == size for one in entries):
            return None
        found = store.find(_tuned_subject(model), _TUNED, Tuned)
        if found is not None:
            msgspec.convert(found.value.changes, prepared(Settings))
    except (OSError, CpuchatError, msgspec.ValidationError):
        return None
    return found.value if found is not None else None


def with_tuned(model: Path, chosen: Settings) -> Settings:
    """Return the settings with which a model is loaded."""
    found = find_tuned(model)
    return found.applied_to(chosen) if found is not None else chosen


def keep_tuned(model: Path, tuned: Tuned) -> None:
    """Keep `tuned`; without changes, forget the model. Reads a sample of it: call it in a thread. Raises ModelNotFound
    if its file cannot be read."""
    if tuned.changes:
        store.keep(_tuned_subject(model), _TUNED, tuned)
    else:
        forget_tuned(model)


def forget_tuned(model: Path) -> bool:
    """Return to the settings as they are; returns whether there was something to forget. Raises ModelNotFound."""
    on = _tuned_subject(model)
    known = store.find(on, _TUNED, Tuned) is not None
    store.forget(on, _TUNED)
    return known


def _tuned_subject(model: Path) -> Subject:
    """Raises ModelNotFound."""
    topology = read_topology()
    of_content = (file_fingerprint(model),)
    settings = {"bytes": model_size(model), "quota": topology.quota}
    return Subject(machine=topology.name, cores=topology.allowed, model=of_content, settings=settings)


class TunedMachine:
    """Reads each set of cores once. A sample of the files of tuned models is read: use it in threads. `machine`: as
    `this_machine` returns it for the settings, with `loaded` counted as unloaded."""

    def __init__(self, settings: Settings, machine: Machine, loaded: ModelInfo | None = None) -> None:
        self._settings, self._loaded, self._machine = settings, loaded, machine
        self._known = {PlacementSpec.of(settings): machine}

    def settings(self, model: Path) -> Settings:
        """Return the settings that a model is loaded with."""
        return with_tuned(model, self._settings)

    def of(self, model: Path) -> Machine:
        """Return the machine with the cores of a model; with those of the settings until these were measured."""
        settings = self.settings(model)
        spec = PlacementSpec.of(settings)
        if spec not in self._known:
            found = this_machine(settings, loaded=self._loaded)
            is_better = found.profile is not None and (self._machine.estimated or not found.estimated)
            self._known[spec] = found if is_better else self._machine
        return self._known[spec]


def machine_for(model: Path, settings: Settings, loaded: ModelInfo | None = None) -> Machine:
    """Return this machine with the cores that a model uses; the other arguments are those of `this_machine`."""
    return TunedMachine(settings, this_machine(settings, loaded=loaded), loaded).of(model)
