"""Create the W&B run of a run folder, and convert the model, images and histograms to W&B objects."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any

from common.config import changed_settings, config, config_keys
from common.runs import description, provenance
from common.runs.folder import MODEL_FACTS_FILE, MODEL_FILE, RunFolder, read_json, write_json
from common.system.text import read_text_or_empty
from configs.shared import Experiment, TrainingExperiment

INIT_TIMEOUT = 20.0  # time limit in seconds for wandb.init in online mode
MAX_TAG_LENGTH = 64  # maximum length in characters; W&B rejects longer tags


def load_run_config(folder: RunFolder) -> Experiment:
    """Read the config of an attempt. Raises UserError if the config is missing or damaged."""
    original = config.read_settings(folder.path)
    changes = changed_settings.read_changes(folder.attempt_folder / changed_settings.CHANGES_FILE)
    changed = {name: new for name, (_, new) in changes.items()}
    schema = config.import_schema(folder.experiment)
    return config.build_config(schema, [config_keys.drop_training_keys(schema, original | changed)])


def init_wandb_run(folder: RunFolder, mode: str, wandb_folder: Path) -> Any:
    """Call wandb.init with the id, name, config and tags of the run.

    W&B writes its files to `wandb_folder`.
    """
    import wandb

    cfg = load_run_config(folder)
    name = folder.experiment
    tags = [name, f"world_size:{cfg.processes}", *cfg.wandb.tags]
    if isinstance(cfg, TrainingExperiment):
        tags.insert(1, f"data:{Path(cfg.data.name).name}"[:MAX_TAG_LENGTH])

    meta = provenance.read_metadata(folder)
    meta["git"] = (meta.get("git") or {}).get("sha")
    facts = {"experiment": name, "run_folder": folder.path.name, "world_size": cfg.processes, "meta": meta}

    id_file = folder.path / "wandb" / "id.json"
    run_id = read_json(id_file).get("id") or secrets.token_hex(4)
    # The id is written before init. If this attempt is killed, the next attempt uses the same id.
    write_json(id_file, {"id": run_id})
    settings = wandb.Settings(
        console="off",
        quiet=True,
        init_timeout=INIT_TIMEOUT,
        x_transaction_log_flush_interval=1.0,
        save_code=False,
        disable_git=True,
    )
    run = wandb.init(
        project=cfg.wandb.project,
        entity=cfg.wandb.entity or None,
        group=cfg.wandb.group or None,
        name=cfg.run.name or folder.path.name,
        notes=description.read_notes(folder, cfg.run.notes) or None,
        id=run_id,
        resume="allow",
        dir=str(wandb_folder),
        mode=mode,  # type: ignore[arg-type]
        tags=tags,
        config=config_keys.nest_values(config_keys.read_values(cfg)) | facts,
        settings=settings,
    )
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run


def log_model_artifact(run: Any, folder: RunFolder) -> None:
    """Add the trained model to the W&B run as an artifact.

    The artifact refers to the files in the run folder, without copying them, until the files are uploaded.
    """
    import wandb

    files = [folder.path / name for name in (MODEL_FILE, MODEL_FACTS_FILE)]
    is_finished = folder.result.get("state") == "finished"
    if not (load_run_config(folder).wandb.model and is_finished and all(map(Path.is_file, files))):
        return
    facts = read_json(folder.path / MODEL_FACTS_FILE)
    metadata = {key: facts.get(key) for key in ("class", "step", "scores")}
    artifact = wandb.Artifact(f"{folder.path.name}-model", type="model", metadata=metadata)
    for file in files:
        artifact.add_file(str(file), policy="immutable", skip_cache=True)  # does not copy the file
    run.log_artifact(artifact)


class MediaReader:
    """Reader of the images and histograms that an attempt's media.jsonl lists."""

    def __init__(self, attempt: RunFolder, lines: int) -> None:
        """Start reading after the first `lines` lines of media.jsonl."""
        self.attempt = attempt
        self.lines = lines

    def read(self) -> list[dict[str, Any]]:
        """Return a W&B row for each new line of media.jsonl.

        A truncated last line is left for a later call. A damaged line is skipped.
        """
        text = read_text_or_empty(str(self.attempt.attempt_folder / "media.jsonl"))
        complete_lines = text[: text.rfind("\n") + 1].splitlines()
        rows = []
        for line in complete_lines[self.lines :]:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                media = json.loads(line)
                row = {str(media["name"]): self.make_wandb_object(media), "global_step": int(media["global_step"])}
                rows.append(row)
        self.lines = max(self.lines, len(complete_lines))
        return rows

    def make_wandb_object(self, media: dict[str, Any]) -> Any:
        """Convert the content of a line of media.jsonl to a W&B image or histogram."""
        import wandb

        file = self.attempt.attempt_folder / "media" / Path(media["file"]).name
        if media["kind"] == "image":
            return wandb.Image(str(file))
        histogram = json.loads(file.read_text())
        return wandb.Histogram(np_histogram=(histogram["counts"], histogram["edges"]))
