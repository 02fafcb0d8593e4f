"""Where the paths of a configuration lead.

Relative paths start from the *project* of the file they stand in: the nearest folder, going up from
the file, that has a `serve_config.yaml` or a `pyproject.toml` (the file's own folder if none has).
Ray builds an application in a worker process, hands over `args` alone, and does not say which file
they came from. There the project is the one around the worker's working directory (that of `serve
run`; on a cluster made with `ray start`, that of `ray start`), or else the one this package is
installed from with `pip install -e`. On a cluster of several nodes, write absolute paths.
"""

import os
from pathlib import Path

from actors.checkpoints.errors import WrongRequest
from actors.checkpoints.plan import at_home
from actors.checkpoints.source import Hub
from actors.text.message_form import check_template, is_template_path
from serve_app.config.errors import ConfigError, Problem
from serve_app.config.model import ModelConfig

_PROJECT_MARKERS = ("serve_config.yaml", "pyproject.toml")


def project_around(folder: Path) -> Path:
    return _marked(folder) or folder


def project_of_process() -> Path:
    return _marked(Path.cwd()) or _marked(Path(__file__).parent) or Path.cwd()


def _marked(folder: Path) -> Path | None:
    for candidate in (folder, *folder.parents):
        if any((candidate / marker).is_file() for marker in _PROJECT_MARKERS):
            return candidate
    return None


def located(path: str, project: Path, *key: str) -> Path:
    """Where a path of the configuration leads; `~` is somebody's home.

    Raises:
        ConfigError: nobody here has that name; says so of `key`.
    """
    try:
        return project / at_home(Path(path))
    except WrongRequest as error:
        raise ConfigError([Problem(str(error), key)]) from error


def with_files(config: ModelConfig, project: Path) -> ModelConfig:
    """The same with its source located, and its chat template read."""
    config = _with_located_source(config, project)
    if config.chat.template is None:
        return config
    template = _read_template(config.chat.template, project)
    return config.model_copy(update={"chat": config.chat.model_copy(update={"template": template})})


def _read_template(template: str, project: Path) -> str:
    """The chat template itself, where its path may be given.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    if not is_template_path(template):
        return template
    file = located(template, project, "chat", "template")
    try:
        text = file.read_text(encoding="utf-8")
        check_template(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError([Problem(f"{shown(file)}: {why}", ("chat", "template"))]) from error
    return text


def _with_located_source(config: ModelConfig, project: Path) -> ModelConfig:
    """Its checkpoint's path absolute, or that of the folder where what comes from a hub is kept."""
    source = config.source
    if source.hub is Hub.PATH:
        paths = {"id": located(source.id, project, "source", "id")}
    elif source.models_dir is not None:
        paths = {"models_dir": located(source.models_dir, project, "source", "models_dir")}
    elif home := os.environ.get("SLEEPSERVE_HOME"):  # where `sleepserve download` puts things, too
        paths = {"models_dir": Path(home) / "models"}
    else:
        return config
    update = {key: str(path) for key, path in paths.items()}
    return config.model_copy(update={"source": source.model_copy(update=update)})


def shown(path: Path) -> str:
    """As short as it can be said from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
