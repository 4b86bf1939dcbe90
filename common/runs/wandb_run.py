"""The W&B run of a run folder: id, name, configuration and tags, the model as an artifact, images and histograms."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any

from common.core import config
from common.core.text import read_or_empty
from common.runs import provenance
from common.runs.folder import MODEL, MODEL_FACTS, Folder, read_json, write_json
from configs.shared import Experiment

INIT = 20.0  # seconds for an online wandb.init
TAG = 64  # characters of a tag that W&B takes


def load_run_config(folder: Folder) -> Experiment:
    """Read the config of an attempt. Raises UserError."""
    changed = config.read_changes(folder.attempt / config.CHANGED)
    layers = [config.read_config_file(folder.path / "config.yaml"), {name: now for name, (_, now) in changed.items()}]
    return config.build_config(config.import_schema(folder.experiment), layers)


def init_wandb_run(folder: Folder, mode: str, place: Path) -> Any:
    """Call wandb.init with the run's own id, name, configuration and tags; its files go below `place`."""
    import wandb

    cfg, name = load_run_config(folder), folder.experiment
    meta = provenance.read_metadata(folder)
    data = [f"data:{Path(cfg.data.name).name}"[:TAG]] if cfg.trains else []
    facts = {"experiment": name, "world_size": cfg.processes}
    facts["meta"] = meta | {"git": (meta.get("git") or {}).get("sha")}
    kept = folder.path / "wandb" / "id.json"
    own = read_json(kept).get("id") or secrets.token_hex(4)
    write_json(kept, {"id": own})  # first: a start that is killed meanwhile leaves it to the next one
    run = wandb.init(
        project=cfg.wandb.project,
        entity=cfg.wandb.entity or None,
        group=cfg.wandb.group or None,
        name=folder.path.name,
        id=own,
        resume="allow",
        dir=str(place),
        mode=mode,  # type: ignore[arg-type]
        tags=[name, *data, f"world_size:{cfg.processes}", *cfg.wandb.tags],
        config=dataclasses.asdict(cfg) | facts,
        settings=wandb.Settings(
            console="off",
            quiet=True,
            init_timeout=INIT,
            x_transaction_log_flush_interval=1.0,
            save_code=False,
            disable_git=True,
        ),
    )
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run


def log_model_artifact(run: Any, folder: Folder) -> None:
    """Give W&B the trained model as an artifact: by reference to the run folder until it is uploaded."""
    import wandb

    files = [folder.path / name for name in (MODEL, MODEL_FACTS)]
    is_finished = folder.result.get("state") == "finished"
    if not (load_run_config(folder).wandb.model and is_finished and all(map(Path.is_file, files))):
        return
    facts = read_json(files[1])
    metadata = {key: facts.get(key) for key in ("class", "step", "scores")}
    artifact = wandb.Artifact(f"{folder.path.name}-model", type="model", metadata=metadata)
    for file in files:
        artifact.add_file(str(file), policy="immutable", skip_cache=True)  # no second copy on this disk
    run.log_artifact(artifact)


class MediaReader:
    """Images and histograms of an attempt, as media.jsonl lists them."""

    def __init__(self, attempt: Folder, lines: int) -> None:
        """Leave out the first `lines` lines."""
        self.attempt, self.lines = attempt, lines

    def read(self) -> list[dict[str, Any]]:
        """Return new ones as rows for W&B. A line that is cut off comes with the next call, a damaged one never."""
        text = read_or_empty(str(self.attempt.attempt / "media.jsonl"))
        complete = text[: text.rfind("\n") + 1].splitlines()
        rows = []
        for line in complete[self.lines :]:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                item = json.loads(line)
                rows.append({str(item["name"]): self.make_wandb_object(item), "global_step": int(item["global_step"])})
        self.lines = max(self.lines, len(complete))
        return rows

    def make_wandb_object(self, item: dict[str, Any]) -> Any:
        """Return the W&B object of a line of media.jsonl."""
        import wandb

        file = self.attempt.attempt / "media" / Path(item["file"]).name
        if item["kind"] == "image":
            return wandb.Image(str(file))
        content = json.loads(file.read_text())
        return wandb.Histogram(np_histogram=(content["counts"], content["edges"]))
