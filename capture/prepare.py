"""What comes before an extraction's first prompt: gate, settings, tokens, probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from capture import gate, probe
from capture.dataset import formats, manifest
from capture.dataset.ledger import Ledger
from capture.dumps import dump
from capture.extraction import ExtractJob, Progress, Tell
from capture.rows import alarms, parallel
from capture.rows.files import read_hash
from capture.rows.tokenise import Outcome, load_tokenizer, tokenise
from capture.rows.vocabulary import vocabulary_size
from capture.server import Server

REPORT_SECONDS = 0.5
# Of the manifest, by a run that goes on; and what was drawn from, until this run draws something.
KEPT = ("created", "input_hash", "limit", "earlier", "alarms", "exported", "finished")


class Prepared(NamedTuple):
    """What is drawn from, `taps` by server, and into what."""

    servers: list[Server]
    taps: list[dump.TapState]
    manifest: manifest.Manifest
    ledger: Ledger
    progress: Progress
    begun: float  # by the monotonic clock


class Preparation:
    """The way to a `Prepared`; raises what `extract` does."""

    def __init__(
        self, job: ExtractJob, output: Path, report: Callable[[Any], None], say: Callable[[str], None], tell: Tell
    ) -> None:
        self.job, self.output, self.report, self.say, self.tell = job, output, report, say, tell
        self.begun = time.monotonic()
        self.told: set[gate.Finding] = set()
        self.progress = Progress(phase="preparing", output=str(output))

    def prepare(self) -> Prepared:
        """Gate, settings, tokens, probe."""
        self.report(self.progress)
        self.servers = [source.server for source in self.job.sources]
        passed = [self._pass_gate(server, longest=None) for server in self.servers]
        self.taps = [tap for tap, _ in passed]
        infos = [info for _, info in passed]
        require_alike(self.servers, self.taps)
        tap = self.taps[0]
        assert tap.layers is not None
        self.tap = tap
        for name in self.job.formats:
            if reason := formats.find(name).refuse(tap.dtype, len(tap.layers.boundaries)):
                raise manifest.ManifestError(f"--format {name}: {reason}")
        tokenizer = load_tokenizer(self.job.server.model, self.job.server.trust_remote_code)
        self.manifest = self._make_manifest(infos, tokenizer)
        self.ledger = Ledger(self.output, begun=bool(self.manifest.input_hash))
        self._tokenise(tokenizer, min(filter(None, map(gate.longest_prompt, infos)), default=None))
        self.progress.longest = self.ledger.longest()
        for server in self.servers:
            self._pass_gate(server, self.progress.longest)
        self.ledger.reopen()
        self.progress.count(self.ledger)
        if self.progress.pending:
            probes = [self._pass_probe(*one, tokenizer) for one in zip(self.servers, self.taps, infos, strict=True)]
            drawn = self._drawn(infos)
            drawn.probe, *beside = map(msgspec.to_builtins, probes)
            for described, found in zip(drawn.beside, beside, strict=True):
                described.probe = found
            self.manifest.draw_from(drawn)
            manifest.write_manifest(self.output, self.manifest)
        now = self.progress
        self.tell(
            "prepared",
            resumed=self.resumed,
            samples=now.samples,
            written=now.written,
            bad_rows=now.bad_rows,
            overlong_rows=now.overlong_rows,
        )
        return Prepared(self.servers, self.taps, self.manifest, self.ledger, self.progress, self.begun)

    def _pass_gate(self, server: Server, longest: int | None) -> tuple[dump.TapState, dict[str, Any]]:
        info, tap, findings = gate.look(server, longest)
        new = [finding for finding in findings if finding not in self.told]
        self.told.update(new)
        for finding in new:
            self.tell("gate", **msgspec.structs.asdict(finding))
        if refusal := gate.refusal(findings):
            raise gate.NotSafe(refusal)
        for finding in new:
            self.say(f"warning: {finding.what}; {finding.remedy}")
        assert tap is not None
        return tap, info

    def _pass_probe(self, server: Server, tap: dump.TapState, info: dict[str, Any], tokenizer: Any) -> probe.Probed:
        """Have the server shown to be safe, unless it has been already."""
        longest = self.ledger.longest()
        found = probe.kept(server, tap, longest)
        earlier = found is not None
        if found is None:
            self.progress.phase = "probing"
            self.report(self.progress)
            # Longer prompts than are drawn need not be probed, and a forward of one might be too much for the GPU.
            found = probe.probe(server, tap, info, tokenizer, lambda what: self.say(f"probe: {what}"), most=longest)
        self.tell("probed", passed=found.passed, earlier=earlier, lengths=found.lengths, ranks=found.ranks)
        for failure in found.failures:
            self.say(f"probe: {failure}")
        if refusal := found.refusal():
            raise gate.NotSafe(refusal)
        return found

    def _make_manifest(self, infos: list[dict[str, Any]], tokenizer: Any) -> manifest.Manifest:
        tap, options = self.tap, self.job.options
        assert tap.layers is not None
        settings = manifest.Settings(
            model=tap.model,
            model_config=manifest.hash_file(Path(tap.model) / "config.json"),
            weights=manifest.hash_weights(Path(tap.model)),
            tokenizer=manifest.hash_tokenizer(tokenizer),
            chat_template=manifest.hash_text(tokenizer.chat_template or ""),
            layers=tap.layers,
            hidden=tap.hidden,
            dtype=tap.dtype,
            max_length=options.max_length,
            overlong=options.overlong,
            last_turn_only=options.last_turn_only,
            prompt_column=options.prompt_column,
            response_column=options.response_column,
            formats=sorted(self.job.formats),
        )
        kept: dict[str, Any] = {"created": time.time(), "input_hash": ""}
        drawn = self._drawn(infos)
        self.resumed = (self.output / "manifest.json").exists()
        if self.resumed:
            earlier = manifest.read_manifest(self.output)
            if earlier.source:
                raise manifest.ManifestError(f"{self.output} was exported from {earlier.source}; extract into that")
            manifest.require_same(earlier.settings, settings, self.output)
            kept, drawn = {name: getattr(earlier, name) for name in KEPT}, earlier
        made = manifest.Manifest(
            settings=settings,
            norms={
                name: manifest.NORMS.get(name, manifest.NORMS["last"])
                for name in dump.state_names(len(tap.layers.boundaries))
            },
            input=self.job.rows,
            updated=time.time(),
            **kept,
            **manifest.described(drawn),
        )
        manifest.write_manifest(self.output, made)
        return made

    def _drawn(self, infos: list[dict[str, Any]]) -> manifest.Drawn:
        """What is drawn from now, not yet probed."""
        first, *more = self.servers
        return manifest.Drawn(
            sglang=self.tap.sglang,
            layertap=self.job.layertap,
            profile=first.profile,
            server=_public(infos[0]),
            beside=[
                manifest.Beside(server.name, server.profile, _public(info))
                for server, info in zip(more, infos[1:], strict=True)
            ],
            gpus=[tap.gpu for tap in self.taps if tap.gpu],
        )

    def _limit(self, longest: int | None) -> int | None:
        """How many tokens a sample may have. Rows that were read by another limit would be other rows."""
        if self.job.options.max_length is not None:
            return self.job.options.max_length
        if not self.manifest.input_hash:
            self.manifest.limit = longest
        limit = self.manifest.limit or longest
        if longest and limit and longest > limit and self.ledger.unused("overlong"):
            self.say(
                f"warning: rows of more than {limit:,} tokens stay out, as the server that this dataset was begun with "
                "took no more; to have them, extract into a new folder"
            )
        return limit

    def _tokenise(self, tokenizer: Any, longest: int | None) -> None:
        """Tokenise the input unless it is the one that the ledger holds already.

        `longest` is what the servers take in one prompt, where they say it.
        """
        now, limit = read_hash(self.job.rows), self._limit(longest)
        if now == self.manifest.input_hash:
            self.say(f"{self.job.rows} is tokenised already")
            self._say_alarms()
            return
        self.progress.phase = "tokenising"
        self.report(self.progress)
        options = msgspec.structs.replace(self.job.options, max_length=limit)
        size = vocabulary_size(self.job.server.model, tokenizer)
        outcomes = tokenise(self.job.rows, tokenizer, options, vocab_size=size, workers=parallel.default_workers())
        found = alarms.Alarms()
        added = self.ledger.add(self._report_rows(found.watch(outcomes, options)))
        self.manifest.input_hash, self.manifest.alarms = now, found.all()
        manifest.write_manifest(self.output, self.manifest)
        self._say_alarms()
        bad = self.ledger.unused("bad")
        self.say(f"{self.job.rows}: {added} samples added, {len(bad)} bad rows")
        for file, line, reason in bad:
            self.say(f"{file}:{line}: {reason}")
        for file, line, reason in self.ledger.unused("overlong"):
            self.say(f"{file}:{line}: {reason}, and no sample may have more than {limit:,}")

    def _report_rows(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """The rows as they are, with how many there were in the progress."""
        last = time.monotonic()
        for outcome in outcomes:
            yield outcome
            self.progress.rows += 1
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                self.report(self.progress)

    def _say_alarms(self) -> None:
        for alarm in self.manifest.alarms:
            self.say(f"warning: {alarms.words(alarm)}")
            self.tell("alarm", id=alarm.id, count=alarm.count, text=alarms.words(alarm))


def require_alike(servers: list[Server], taps: list[dump.TapState]) -> None:
    """Raise gate.NotSafe where servers would not draw the same states of the same prompt."""
    for server, tap in zip(servers[1:], taps[1:], strict=True):
        for name in ("model", "sglang", "layers", "hidden", "dtype"):
            first, other = getattr(taps[0], name), getattr(tap, name)
            if first != other:
                shown = (first.words(), other.words()) if name == "layers" else (first, other)
                raise gate.NotSafe(
                    f"the servers draw other states: {name} is {shown[0]} of {servers[0].name}, {shown[1]} of "
                    f"{server.name}; launch both alike"
                )


def _public(info: dict[str, Any]) -> dict[str, Any]:
    """The server's resolved arguments without secrets and without what changes from minute to minute."""
    hidden = ("api_key", "admin_api_key", "internal_states", "launch_command", "env_vars", "startup_time")
    return {key: value for key, value in info.items() if key not in hidden}
