"""The Serve configuration that `sleepserve serve` runs, made of what its command line names.

Models stand in it in place and its paths are absolute, so it means the same in every folder.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.checkpoints.source import Hub
from serve_app.config.errors import ConfigError, Problem, validate
from serve_app.config.files import (
    ARGS_OF,
    LLM,
    WEIGHTS,
    ServeConfig,
    as_written,
    check_file,
    check_names,
    checkpoint_problem,
    is_serve_config,
    load_model_config,
)
from serve_app.config.model import ModelConfig, is_model_name
from serve_app.config.paths import with_files

Settings = dict[str, Any]  # what a YAML file says

_PACKAGE = Path(__file__).parents[1]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says beside the models; None: what the files say, or the default.

    Attributes:
        hub: of models that are named OWNER/NAME.
        num_gpus: of models that no YAML file describes.
    """

    hub: Hub
    num_gpus: int
    host: str | None = None
    port: int | None = None
    served_model_names: tuple[str, ...] = ()  # the first is the model's own
    chat_template: str | None = None
    dtype: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None

    @property
    def http_options(self) -> Settings:
        return _given({"host": self.host, "port": self.port})

    @property
    def of_models(self) -> Settings:
        """Keys of `ModelConfig`."""
        engine = {
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        return _given(
            {
                "model_id": next(iter(self.served_model_names), None),
                "aliases": list(self.served_model_names[1:]) or None,
                "chat": _given({"template": self.chat_template}),
                "dtype": self.dtype,
                "source": _given({"revision": self.revision}),
                "engine": _given(engine),
            }
        )


def compose(names: Sequence[str], options: Options) -> ServeConfig:
    """What a serve_config.yaml says that serves these models.

    Args:
        names: hub ids, checkpoint directories, models' YAML files; or one serve_config.yaml. None of them: the
            demo model.

    Raises:
        ConfigError: a name stands for nothing, or something in a file or an option is wrong.
    """
    names = names or [str(shipped("configs/demo.yaml"))]
    if whole := [name for name in names if is_serve_config(name)]:
        if len(names) > 1:
            raise ConfigError([Problem("names its own models; serve it alone", file=whole[0])])
        config = _of_file(whole[0], options)
    else:
        _check_options(len(names), options)
        config = _of_models(names, [_model(name, options) for name in names])
    config.data["http_options"] |= options.http_options
    return config


def shipped(name: str) -> Path:
    """A file of the repository that the wheel has as well (`force-include` in pyproject.toml)."""
    installed = _PACKAGE / "shipped" / name
    return installed if installed.exists() else _PACKAGE.parent / name


def _of_models(names: Sequence[str], models: Sequence[ModelConfig]) -> ServeConfig:
    """As serve_config.yaml has it, which says why."""
    check_names(models, names)
    written = [as_written(model) for model in models]
    data = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "logging_config": {"encoding": "TEXT", "log_level": "INFO"},
        "applications": [
            {
                "name": "weights",
                "route_prefix": None,
                "import_path": WEIGHTS,
                "args": {"models": written},
            },
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": LLM,
                "external_scaler_enabled": True,
                "args": {"models": written},
            },
        ],
    }
    return ServeConfig(data, tuple(models))


def _of_file(file: str, options: Options) -> ServeConfig:
    config = check_file(file)
    _check_options(len(config.models), options)
    if not options.of_models:
        return config
    models: dict[str, ModelConfig] = {}
    for application in config.data["applications"]:
        if application["import_path"] in ARGS_OF:
            args = application["args"]
            changed = [_merged(file, settings, options) for settings in args["models"]]
            check_names(changed, [file] * len(changed))
            models.update((model.model_id, model) for model in changed)
            args["models"] = [as_written(model) for model in changed]
    return replace(config, models=tuple(models.values()))


def _check_options(models: int, options: Options) -> None:
    if options.served_model_names and models > 1:
        text = "is for one model; give each of several a YAML file with its model_id"
        raise ConfigError([Problem(text, file="--served-model-name")])


def _model(name: str, options: Options) -> ModelConfig:
    path = Path(name)
    settings: Settings
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        config = load_model_config(path)
        if not options.of_models:
            return _served(name, config)
        settings = as_written(config)
    elif path.is_dir():
        path = path.resolve()
        if not options.served_model_names and not is_model_name(path.name):
            text = f"{path.name!r}, the directory's name, cannot be a model's; give one with --served-model-name"
            raise ConfigError([Problem(text, ("model_id",), file=name)])
        settings = {"model_id": path.name, "source": {"id": str(path)}}
        settings["num_gpus"] = options.num_gpus
    elif _HUB_ID.fullmatch(name):
        settings = {"model_id": name, "source": {"hub": options.hub.value, "id": name}}
        settings["num_gpus"] = options.num_gpus
    else:
        text = "no such file or directory, and no OWNER/NAME of a hub"
        raise ConfigError([Problem(text, file=name)])
    return _merged(name, settings, options)


def _merged(origin: str, settings: Settings, options: Options) -> ModelConfig:
    """Of the settings with the options' own; wrong ones are told as those of `origin`."""
    merged = dict(settings)
    for key, value in options.of_models.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    try:
        model = with_files(validate(ModelConfig, merged), Path.cwd())
        if options.revision is not None and model.source.hub is Hub.PATH:
            text = f"{model.model_id} is a directory, which has none; --revision is for models of a hub"
            raise ConfigError([Problem(text, ("source", "revision"))])
    except ConfigError as error:
        raise error.inside(file=origin) from error
    return _served(origin, model)


def _served(origin: str, model: ModelConfig) -> ModelConfig:
    """The same, once its checkpoint was looked for."""
    if problem := checkpoint_problem(model):
        raise ConfigError([problem.inside(file=origin)])
    return model


def _given(settings: Settings) -> Settings:
    return {key: value for key, value in settings.items() if value not in (None, {})}
