"""Everything that serve_config.yaml and configs/*.yaml may say, and how they are read.

Two kinds of file. `serve_config.yaml` is Ray Serve's own; the `args` of our two applications in it
are `WeightsArgs` and `AppArgs`. A file in `configs/` describes one model: `ModelConfig`. The list
`models` of either application names such files, or holds the same keys in place.

Relative paths start from the project that `paths` finds.

Wrong configuration is a `ConfigError`: one line per mistake, naming file, key and remedy.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from actors.card.config import CardConfig
from actors.checkpoints.directory import (
    CONFIG_NAME,
    damaged_weights,
    longest_sequence,
    missing_from_checkpoint,
    unsupported_weights,
    weight_files,
)
from actors.checkpoints.source import Hub
from actors.holder.config import HostConfig, folder_problem
from serve_app.config.errors import (
    ConfigError,
    Problem,
    did_you_mean,
    problems_of,
    refuse_switches_for_numbers,
    short,
    unknown_keys,
    validate,
)
from serve_app.config.http import MAX_NAME_CHARS, HttpSettings
from serve_app.config.keys import read_keys, variables_in
from serve_app.config.model import ModelConfig
from serve_app.config.paths import (
    located,
    project_around,
    project_of_process,
    shown,
    with_files,
)

_PORTS = range(1, 2**16)
_MAX_NUMBER_CHARS = 100
_MAX_VALUES = 100_000  # of a YAML file, its aliases written out
_SHAPES = ("demo", "tiny")  # what `sleepserve make-checkpoint` makes in no time


# --- what the files may say ---


def _load_named(entry: object, info: ValidationInfo) -> object:
    if not isinstance(entry, str):
        return entry
    project = _project_in(info)
    file = project / entry
    if not file.is_file():
        known = [str(path.relative_to(project)) for path in project.glob("configs/*.yaml")]
        raise ConfigError([Problem(f"no file {entry} in {project}{did_you_mean(entry, known)}")])
    return load_model_config(file)


def _named(problem: Problem, args: Any) -> Problem:
    """With the name of the model that it is about: who reads "models.7" would have to count."""
    if problem.file or problem.key[:1] != ("models",) or len(problem.key) < 3:
        return problem
    entry = args["models"][problem.key[1]]
    name = entry.get("model_id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or problem.key[2] == "model_id":
        return problem
    return replace(problem, text=f"{problem.text} (model {name[:MAX_NAME_CHARS]})")


def _find_files(config: ModelConfig, info: ValidationInfo) -> ModelConfig:
    return with_files(config, _project_in(info))


def _project_in(info: ValidationInfo) -> Path:
    return info.context["project"] if info.context else project_of_process()


class _ModelList(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[
        Annotated[ModelConfig, BeforeValidator(_load_named), AfterValidator(_find_files)], ...
    ] = Field(description="Files in configs/, or what such a file says, in place.")

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Pydantic's, with our one line per mistake: Ray calls it when it builds an application."""
        refuse_switches_for_numbers(obj, cls)
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise ConfigError(_named(each, obj) for each in problems_of(error, cls)) from None

    @model_validator(mode="after")
    def _models_differ(self) -> "_ModelList":
        if not self.models:
            raise ConfigError([Problem("names no model", ("models",))])
        places = [f"models.{index}" for index in range(len(self.models))]
        for index, problem in same_names(self.models, places):
            raise ConfigError([problem.inside(("models", index))])
        return self


def same_names(
    models: Sequence[ModelConfig], places: Sequence[str]
) -> Iterator[tuple[int, Problem]]:
    """Models that cannot be told apart from one before: which, and why.

    Args:
        places: what to call each model.
    """
    taken: dict[str, str] = {}
    deployments: dict[str, str] = {}
    for index, (model, place) in enumerate(zip(models, places, strict=True)):
        for key, names in {"model_id": (model.model_id,), "aliases": model.aliases}.items():
            for name in names:
                if name in taken:
                    text = f"{name} is the name of {taken[name]} already"
                    yield index, Problem(text, (key,))
                taken.setdefault(name, place)
        other = deployments.setdefault(model.deployment, model.model_id)
        if other != model.model_id:
            text = f"{model.model_id} and {other} are one name to Ray Serve, {model.deployment}"
            yield index, Problem(text, ("model_id",))


def check_names(models: Sequence[ModelConfig], files: Sequence[str]) -> None:
    """Raises ConfigError if two models, or one twice, have a name; it names the later one's file."""
    for index, problem in same_names(models, files):
        raise ConfigError([problem.inside(file=files[index])])


def _find_disk_dir(host: HostConfig, info: ValidationInfo) -> HostConfig:
    if host.disk_dir is None:
        return host
    folder = located(host.disk_dir, _project_in(info), "disk_dir")
    return host.model_copy(update={"disk_dir": str(folder)})


class WeightsArgs(_ModelList):
    """Arguments of the `weights` application."""

    preload: bool = Field(
        default=True,
        description="Pack every model when the holder starts, not when a replica first asks; those that `host.memory_budget_gib` has no room "
        "for wait until one does.",
    )
    host: Annotated[HostConfig, AfterValidator(_find_disk_dir)] = Field(
        default_factory=HostConfig, description="What each node has for packed images."
    )


def _find_key_files(http: HttpSettings, info: ValidationInfo) -> HttpSettings:
    project = _project_in(info)
    files = {"api_keys_file": http.api_keys_file, "admin_keys_file": http.admin_keys_file}
    found = {
        name: str(located(file, project, name)) for name, file in files.items() if file is not None
    }
    return http.model_copy(update=found)


class AppArgs(_ModelList):
    """Arguments of the `llm` application."""

    http: Annotated[HttpSettings, AfterValidator(_find_key_files)] = Field(
        default_factory=HttpSettings, description="What the HTTP front allows."
    )
    card: CardConfig = Field(
        default_factory=CardConfig, description="Every card that the models share."
    )


# Import paths of the applications `weights` and `llm`.
WEIGHTS = "serve_app.app:build_weights"
LLM = "serve_app.app:build_app"
ARGS_OF: dict[str, type[_ModelList]] = {WEIGHTS: WeightsArgs, LLM: AppArgs}


# --- reading ---


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What a serve_config.yaml says, all of it valid.

    Attributes:
        data: its text as Python has it, with its models' files written out, its paths absolute and its port there, a number.
        models: that its applications name, each once.
        card: of the application that serves them.
        host: of the one that holds their images.
    """

    data: dict[str, Any]
    models: tuple[ModelConfig, ...]
    card: CardConfig = field(default_factory=CardConfig)
    host: HostConfig = field(default_factory=HostConfig)


def as_written(config: BaseModel) -> dict[str, Any]:
    """What a YAML file has to say for it: nothing of what is left to its default."""
    return config.model_dump(mode="json", exclude_unset=True)


def load_model_config(path: str | Path) -> ModelConfig:
    """One file of `configs/`, its checkpoint path made absolute.

    Whether that checkpoint is there is not looked at: see `checkpoint_problem`.

    Raises:
        ConfigError: no such file, or something in it is wrong.
    """
    file = Path(path)
    with _told_of(file):
        config = validate(ModelConfig, _read_yaml(file))
        return with_files(config, project_around(file.absolute().parent))


@contextmanager
def _told_of(file: Path) -> Iterator[None]:
    """Have a ConfigError name the file."""
    try:
        yield
    except ConfigError as error:
        raise error.inside(file=shown(file)) from error


def checkpoint_problem(config: ModelConfig) -> Problem | None:
    """What to tell the user of a checkpoint that is not there, or cannot be served as it is to be.

    That of a hub is looked at once it is here.
    """
    try:
        return _checkpoint_problem(config)
    except OSError as error:
        text = f"{error.filename or config.source.id} cannot be read: {error.strerror or error}"
        return Problem(text, ("source", "id"))


def _checkpoint_problem(config: ModelConfig) -> Problem | None:
    from actors.checkpoints.download import (  # the hubs' libraries
        CheckpointMissing,
        find_checkpoint,
    )

    try:
        checkpoint = find_checkpoint(config.source)
    except CheckpointMissing:
        return _missing(Path(config.source.id)) if config.source.hub is Hub.PATH else None
    # A weights file that may not be read is none at all to safetensors ("No such file").
    for file in (checkpoint / CONFIG_NAME, *weight_files(checkpoint)):
        file.open("rb").close()
    if why := unsupported_weights(checkpoint) or damaged_weights(checkpoint):
        return Problem(why, ("source", "id"))
    wanted, knows = config.engine.max_model_len, longest_sequence(checkpoint)
    if wanted is not None and knows is not None and wanted > knows:
        text = f"{wanted}, but the checkpoint's max_position_embeddings is {knows}"
        return Problem(text, ("engine", "max_model_len"))
    return None


def _missing(folder: Path) -> Problem:
    """Why that folder is no complete checkpoint, and what to do."""
    if (folder / CONFIG_NAME).is_file():
        why = missing_from_checkpoint(folder)
        text = f"no complete checkpoint in {shown(folder)}: {why}; fetch it again"
        return Problem(text, ("source", "id"))
    remedy = "name a directory with config.json and *.safetensors, or a hub in source.hub"
    if folder.name in _SHAPES:
        remedy = f"`sleepserve make-checkpoint {shown(folder)} --shape {folder.name}` makes it"
    return Problem(f"no checkpoint in {shown(folder)}; {remedy}", ("source", "id"))


def check_file(path: str | Path) -> ServeConfig:
    """What a serve_config.yaml, or a file of `configs/`, says.

    Raises:
        ConfigError: something is wrong, or a checkpoint is not there.
    """
    file = Path(path)
    with _told_of(file):
        data = _read_yaml(file)
        if "applications" not in data and data.keys() & ModelConfig.model_fields.keys():
            config = load_model_config(file)
            for _, problem in same_names((config,), ("this model",)):
                raise ConfigError([problem])
            _require_checkpoints((config,), [str(file.absolute())], file.parent)
            return ServeConfig(data, (config,))
        return _check_serve_config(data, project_around(file.absolute().parent))


def is_serve_config(path: str | Path) -> bool:
    """Whether it is a file, and no model's.

    Raises:
        ConfigError: it is a file, but not of YAML's mappings.
    """
    file = Path(path)
    with _told_of(file):
        return file.is_file() and "applications" in _read_yaml(file)


def _check_serve_config(data: dict[str, Any], project: Path) -> ServeConfig:
    """What `data` says, all of it valid; relative paths start from `project`."""
    from ray.serve.schema import (
        DeploymentSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    if problems := list(_no_mappings(data)):
        raise ConfigError(problems)
    problems = list(unknown_keys(data, ServeDeploySchema))  # here, too, Ray drops them
    problems += variables_in(data)
    schema = validate(ServeDeploySchema, data)
    for key, options in (
        ("http_options", schema.http_options),
        ("grpc_options", schema.grpc_options),
    ):
        problems += [p.inside((key,)) for p in unknown_keys(data.get(key) or {}, type(options))]
        if options.port not in _PORTS:
            text = f"expected {_PORTS.start} to {_PORTS.stop - 1}, found {options.port}"
            problems.append(Problem(text, (key, "port")))
    http = data.get("http_options") or {}
    if "host" not in http:
        text = "missing, and Ray would listen on every interface; write host: 127.0.0.1"
        problems.append(Problem(text, ("http_options", "host")))
    for application in data["applications"]:
        here = ("applications", application.get("name", "default"))
        problems += [p.inside(here) for p in unknown_keys(application, ServeApplicationSchema)]
        for deployment in application.get("deployments") or ():
            its = (*here, "deployments", deployment["name"])
            problems += [p.inside(its) for p in unknown_keys(deployment, DeploymentSchema)]
            problems += [p.inside(its) for p in _settings_of_models(deployment)]
    if problems:
        raise ConfigError(problems)
    # Ray's own where it is absent; and text of digits is a number to Ray.
    http["port"] = schema.http_options.port

    models: dict[str, ModelConfig] = {}
    card, host = CardConfig(), HostConfig()
    for application, written in zip(schema.applications, data["applications"], strict=True):
        try:
            args = _check_application(application.import_path, application.args, project)
        except ConfigError as error:
            raise error.inside(("applications", application.name)) from error
        if args is not None:
            for index, model in enumerate(args.models):
                first = models.setdefault(model.model_id, model)
                if (first.source, first.dtype) != (model.source, model.dtype):
                    text = "another source or dtype than in the application before: its image would be of no use"
                    there = ("applications", application.name, "args", "models", index)
                    problems.append(Problem(f"{text} (model {model.model_id})", there))
            written["args"] = as_written(args)
        if isinstance(args, AppArgs):
            card = args.card
        elif isinstance(args, WeightsArgs):
            host = args.host
    if problems:
        raise ConfigError(problems)
    return ServeConfig(data, tuple(models.values()), card, host)


def _no_mappings(data: dict[str, Any]) -> Iterator[Problem]:
    """Deployments that are none: Ray looks into them before it checks what they are (schema.py, 2.60)."""
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for place, each in enumerate(deployments if isinstance(deployments, list) else ()):
            if not isinstance(each, dict):
                here = ("applications", index, "deployments", place)
                yield Problem(f"expected a mapping, found {short(each)}", here)


def _settings_of_models(deployment: dict[str, Any]) -> Iterator[Problem]:
    """What follows from the file of a model, and here would contradict that."""
    if deployment["name"].startswith("model:"):
        for key in ("max_ongoing_requests", "num_replicas", "autoscaling_config"):
            if key in deployment:
                yield Problem(
                    "write it in the model's own file, where all that it decides is", (key,)
                )


def _check_application(import_path: str, args: dict[str, Any], project: Path) -> _ModelList | None:
    if import_path not in ARGS_OF:
        if not import_path.startswith("serve_app."):
            return None  # somebody else's application beside ours
        text = f"nothing to build at {import_path}{did_you_mean(import_path, ARGS_OF)}"
        raise ConfigError([Problem(text, ("import_path",))])
    try:
        valid = ARGS_OF[import_path].model_validate(args, context={"project": project})
        _require_checkpoints(valid.models, args["models"], project)
        if isinstance(valid, AppArgs):
            read_keys(valid.http.api_keys_file, valid.http.admin_keys_file, {})
        if isinstance(valid, WeightsArgs) and valid.host.disk_dir is not None:
            problem = folder_problem(Path(valid.host.disk_dir))
            if problem is not None:
                raise ConfigError([Problem(problem, ("host", "disk_dir"))])
    except ConfigError as error:
        raise error.inside(("args",)) from error
    return valid


def _require_checkpoints(
    models: tuple[ModelConfig, ...], entries: list[object], project: Path
) -> None:
    problems = []
    for index, (model, entry) in enumerate(zip(models, entries, strict=True)):
        if problem := checkpoint_problem(model):
            file = shown(project / entry) if isinstance(entry, str) else ""
            problems.append(problem.inside(() if file else ("models", index), file))
    if problems:
        raise ConfigError(problems)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses what YAML takes for something else without a word.

    Of a key given twice it keeps the last; 10:00 is 600, in base sixty. Dates are texts. A few aliases of
    aliases are gigabytes.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            self._count(node, {})
        return node

    def _count(self, node: yaml.Node, counted: dict[yaml.Node, int | None]) -> int:
        """The values of a node, its aliases written out. One that is being counted holds itself."""
        if node in counted:
            known = counted[node]
            if known is None:
                text = "an alias is here inside of what it stands for"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
            return known
        counted[node] = None
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        total = 1 + sum(self._count(each, counted) for each in inner)
        if total > _MAX_VALUES:
            text = f"more than {_MAX_VALUES} values from here on, its aliases written out"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
        counted[node] = total
        return total

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is here twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def refuse_base_sixty(self, node: yaml.ScalarNode) -> object:
        if len(node.value) > _MAX_NUMBER_CHARS:
            text = f"a number of {len(node.value)} characters"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
        if ":" in node.value:
            text = f"{node.value} is a number in base sixty here; write a unit, as 10h, or quotes"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
        is_int = node.tag == _INT
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)

    def keep_text(self, node: yaml.ScalarNode) -> object:
        return self.construct_scalar(node)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.add_constructor(_INT, _Loader.refuse_base_sixty)
_Loader.add_constructor(_FLOAT, _Loader.refuse_base_sixty)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.keep_text)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise ConfigError([Problem("no such file")]) from error
    except OSError as error:
        raise ConfigError([Problem(f"cannot be read: {error.strerror}")]) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError([Problem(f"line {line}: {error.problem}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem("too many lists or mappings inside of each other")]) from error
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the last two: as !!bool 7
        raise ConfigError([Problem(f"no YAML: {' '.join(str(error).split())}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem(f"expected a mapping, found {short(data)}")])
    return data
