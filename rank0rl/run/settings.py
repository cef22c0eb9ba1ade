"""Read the settings of a run from the command line, a TOML file or a checkpoint; write them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rank0rl.envs.make import base, resolve
from rank0rl.options import apply, whole_number
from rank0rl.run import checkpoint, files
from rank0rl.run.agents import absolute, load_agent, short_name
from rank0rl.run.code import with_copies
from rank0rl.run.launch_options import Words, find_config, is_settings_name, program
from rank0rl.run.logger import MissingRowsError, check_rows
from rank0rl.run.options import RunOptions
from rank0rl.run.trust import FUNCTIONS, functions_of, trusted

_COUNT = 1 << 63
_LENGTH = 1 << 17  # characters of all settings as JSON
_WEIGHTS = 1 << 26  # number that fits into any memory
_A_LAYER = 1 << 12  # numbers that take as much memory as what each layer brings besides its weights


@dataclass(frozen=True)
class Found:
    """The options of a run that begins or goes on, and their source."""

    file: Path | None
    """The TOML file or the checkpoint that the settings come from; None without one."""
    options: RunOptions
    """The run's options, with the full id of the environment."""
    agent: Any
    """The agent's options."""
    run: Path | None = None
    """The folder of the run that goes on. None: a new run begins."""
    made: int = 0
    """Number of iterations that the run has made."""
    before: tuple[RunOptions, Any] | None = None
    """Options that the run and its agent began with; None for a new run."""


def read(words: Words, configs: Path | None) -> Found:
    """Read the options of a run that begins or goes on.

    Args:
        words: the command line.
        configs: folder of TOML files, one of which may be loaded by itself.

    Raises:
        ValueError: for a wrong setting, an agent that does not exist, or a run that cannot go on.
        SystemExit: when help was asked for, or an argument is wrong, after tyro has printed it.
    """
    run, made, before = words.run, 0, None
    if run:
        file, saved, made = _last_checkpoint(run, words)
        before = of_file(saved, str(file))
    if before is None or words.is_auto:
        named, options, agent = _read_new(words, configs)
    else:
        named, (options, agent) = file, _read_line(words, saved, str(file))
    if not options.env_id:
        raise ValueError(
            f"name an environment, such as: {' '.join(program())} Walker2d (--help for more)"
        )
    options = dataclasses.replace(
        options, env_id=resolve(options.env_id), resume=str(run) if run else None
    )
    return Found(named, options, agent, run, made, before)


def _last_checkpoint(run: Path, words: Words) -> tuple[Path, dict[str, Any], int]:
    """Return a run's last checkpoint, the settings in it, and the number of iterations made.

    A checkpoint whose rows have not reached the disk, before a power cut, does not count if the one before it has its
    rows, and is not that of the beginning: more is lost then than a power cut takes. With --shorter-record it does.

    Raises:
        ValueError: if the run cannot go on from there, because one of its files is damaged.
    """
    if run.is_file():
        raise ValueError(f"a run goes on in its folder: got the file {run}; name the folder")
    path = checkpoint.latest(run)
    saved = read_saved(path, words)
    lost = _missing_rows(run, saved)
    if lost and not words.given.get("shorter_record"):
        earlier = checkpoint.before(run, saved["progress"]["iteration"] - 1)
        path = earlier or path
        saved = read_saved(path, words)
        if not saved["progress"]["iteration"] or _missing_rows(run, saved):
            raise lost
    made = saved["progress"]["iteration"]
    if lost:
        print(f"note: progress.csv has lost rows: going on from {path}", file=sys.stderr)
    starts(run / "config.toml")  # damaged, it is better found now than when ranks wait
    return path, saved["settings"], made


def _missing_rows(run: Path, saved: Mapping[str, Any]) -> MissingRowsError | None:
    """Return the error if a run's record lacks rows of a checkpoint.

    Raises:
        ValueError: if its rows differ.
    """
    try:
        check_rows(run, saved["progress"]["iteration"], saved["rows_sha256"])
    except MissingRowsError as error:
        return error
    return None


def read_saved(path: Path, words: Words | None = None, trust: bool = False) -> dict[str, Any]:
    """Read the checkpoint of a run, if what its settings name may be imported here.

    Args:
        path: the checkpoint.
        words: the command line, which may name the code or say --trust. None: there is none.
        trust: True if the user trusts the code.

    Returns:
        The state, as `State.snapshot` gave it.

    Raises:
        ValueError: if the checkpoint is damaged, is not of a run, or names code that is not trusted.
    """
    saved = checkpoint.read(path)
    parts = ("settings", "progress", "collector", "weights", "agent")
    if (
        not isinstance(saved, dict)
        or not all(isinstance(saved.get(name), dict) for name in parts)
        or not isinstance(saved["progress"].get("iteration"), int)
        or not isinstance(saved.get("rows_sha256"), str)
    ):
        raise ValueError(f"checkpoint {path} holds no run: expected {', '.join(parts)}")
    try:
        _check_sizes(saved, path)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"checkpoint {path} holds no run: {error}") from None
    settings = trusted(_with_moved_agent(saved["settings"], words), str(path), words, trust)
    run = path.resolve().parent.parent
    if trust or (words and words.given.get("trust")):
        at, counting = saved["progress"]["iteration"], starts(run / "config.toml", that_count=True)
        own = [one for one in counting if one["iteration"] <= at]
        settings = with_copies(settings, run, own[-1] if own else {})
    return {**saved, "settings": settings}


def _check_sizes(saved: Mapping[str, Any], path: Path) -> None:
    """Refuse settings of more environments or weights than a checkpoint holds, before they are made.

    Raises:
        ValueError: naming the setting.
    """
    settings, envs = saved["settings"], saved["collector"].get("envs", {})
    _check_length(settings, path)
    made = saved["progress"]["iteration"]
    if path.stem.isdecimal() and int(path.stem) != made:
        raise ValueError(f"checkpoint {path} must be of the iteration in its name: got {made:.50g}")
    for name, value in saved["progress"].items():
        if isinstance(value, int) and not 0 <= value < _COUNT:
            raise ValueError(f"checkpoint {path} holds no run: {name} must be in [0, 2**63)")
    num_envs = settings.get("num_envs", RunOptions.num_envs)
    counts = {len(array) for name, array in envs.items() if name not in ("act", "state")}
    if counts - {num_envs}:
        raise ValueError(
            f"checkpoint {path} must hold the episodes of {num_envs!r:.20} environments, as its settings "
            f"say: got {counts}"
        )
    most = max(_WEIGHTS, sum(tensor.numel() for tensor in saved["weights"].values()))
    for name, sizes in settings.items():
        units = [sizes, sizes] if name == "memory_size" else sizes
        is_layers = str(name).endswith(("hidden", "memory_size")) and isinstance(units, list)
        pairs = itertools.pairwise((1, *units, 1)) if is_layers else ()
        if sum(n * m + _A_LAYER for n, m in pairs) > most:
            raise ValueError(f"checkpoint {path} does not hold the weights of {name} {sizes!r:.50}")


def _with_moved_agent(settings: dict[str, Any], words: Words | None) -> dict[str, Any]:
    """Return a run's settings with the new path of the agent's file, if the file has moved.

    It has moved if it is not in its old place, and the command line names a file of the same name. If
    both name a class, the classes have the same name too.
    """
    named = words.given.get("algo", "") if words else ""
    (new, _, new_class), (old, _, old_class) = (
        str(algo).partition(":") for algo in (named, settings.get("algo"))
    )
    is_moved = old.endswith(".py") and Path(new).name == Path(old).name and not Path(old).exists()
    if is_moved and (new_class == old_class or "" in (new_class, old_class)):
        return {**settings, "algo": absolute(named)}
    return settings


def _read_new(words: Words, configs: Path | None) -> tuple[Path | None, RunOptions, Any]:
    """Return the TOML file of a new run, the run's options, and the agent's.

    The file is the one that --config names, else that of the agent and the environment.

    Raises:
        ValueError: if there are no settings of the name that --config gives.
    """
    given = words.given.get("config")
    if given and not is_settings_name(given):
        settings = trusted(load(Path(given)), given, words)
        return Path(given), *_read_line(words, settings, given)
    without_help = [word for word in words.argv if word not in ("-h", "--help")]
    options, agent = _read_line(dataclasses.replace(words, argv=without_help), {}, "")
    path = None
    if options.env_id and configs:
        env = base(resolve(options.env_id))
        own = short_name(options.algo), load_agent(options.algo).settings
        found = (find_config(configs, name, env) for name in ([given] if given else own) if name)
        path = next(filter(None, found), None)
    if given and not path:
        known = (
            sorted({file.stem.partition("-")[0] for file in configs.glob("*.toml")})
            if configs
            else []
        )
        raise ValueError(
            f"--config takes a TOML file, or a name of settings in configs/ ({', '.join(known)}): got {given!r}"
        )
    settings = load(path) if path else {}  # code that configs/ names is trusted
    if words.is_help:
        _read_line(words, settings, str(path))  # prints the help, with the values of this run
    if not path:
        return None, options, agent
    named = words.flags() | {"env_id"}
    run, own = of_file(_without_others(settings, words), str(path), options.algo)
    return path, _over(run, options, named), _over(own, agent, named)


def _over(below: Any, above: Any, named: set[str]) -> Any:
    """Return options with values of `above`, where the command line names them or they are no defaults."""
    plain = type(above)()
    values = {
        name: value
        for name, value in vars(above).items()
        if name in named or value != getattr(plain, name)
    }
    return dataclasses.replace(below, **values)


def _read_line(words: Words, settings: Mapping[str, Any], source: str) -> tuple[RunOptions, Any]:
    """Return the run's options and the agent's: the command line, over settings, over defaults.

    Args:
        words: the command line.
        settings: option -> value, as in a file.
        source: the file, for messages.

    Raises:
        ValueError: for a wrong setting, or an agent that does not exist.
        SystemExit: for a wrong argument, after tyro has said what is wrong.
    """
    settings = _without_others(settings, words)
    defaults = of_file(settings, source, words.given.get("algo"))
    words.check_names({f.name: str(f.type) for part in defaults for f in fields(part)})
    unnamed = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "Both",
        [
            ("run", Annotated[RunOptions, unnamed]),
            ("agent", Annotated[type(defaults[1]), unnamed]),
        ],
        frozen=True,
    )
    parsed = tyro.cli(
        both,
        args=words.argv,
        default=both(*defaults),
        prog=" ".join(program()),
        description="Train an agent on N ranks. The values shown are those that this run would have.",
        registry=_WHOLE_NUMBERS,
    )
    return _with_whole_paths(parsed.run), parsed.agent


_WHOLE_NUMBERS = ConstructorRegistry()


@_WHOLE_NUMBERS.primitive_rule
def _of_whole_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Let tyro read 1e6 as an int, as `options.read_some` does."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def of_file(
    settings: Mapping[str, Any], source: str, algo: str | None = None
) -> tuple[RunOptions, Any]:
    """Return the run's options and the agent's: settings, over defaults.

    Args:
        settings: option -> value, as in a file.
        source: the file, for messages.
        algo: name of the agent. None: the agent that the settings name.

    Raises:
        ValueError: for a wrong setting, or an agent that does not exist.
    """
    algo = algo or str(settings.get("algo", RunOptions.algo))
    options, agent = apply(settings, RunOptions(), load_agent(algo).Options(), source=source)
    return _with_whole_paths(options), agent


def _without_others(settings: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """Return settings without their kind of batch, or of end, if the command line has the other kind."""
    settings, flags = dict(settings), words.flags()
    if "total_steps" in flags and "num_episodes" not in flags:
        settings.pop("num_episodes", None)
    for given, other in itertools.permutations(("steps_per_batch", "episodes_per_batch")):
        if given in words.given:
            settings.pop(other, None)
    return settings


def _with_whole_paths(options: RunOptions) -> RunOptions:
    """Return options with absolute paths of code, because a run may be resumed from another folder."""
    paths: dict[str, Any] = {"algo": absolute(options.algo)}
    for name in FUNCTIONS:
        found = [absolute(function) for function in functions_of(options, name)]
        paths[name] = tuple(found) if name == "hook" else next(iter(found), None)
    return dataclasses.replace(options, **paths)


def load(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file, without the tables [[record]] of a run's config.toml.

    Raises:
        ValueError: if the file cannot be read, or is not TOML.
    """
    settings = files.read_toml(path, "config")
    settings.pop("record", None)
    _check_length(settings, path)
    return settings


def _check_length(settings: Mapping[str, Any], path: Path) -> None:
    """Refuse settings that take long to check, such as 100,000 wrappers.

    Raises:
        ValueError: naming the longest of them.
    """
    sizes = {name: len(json.dumps(value, default=repr)) for name, value in settings.items()}
    if sum(sizes.values()) > _LENGTH:
        longest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"{path}: settings must have at most {_LENGTH:,} characters: got {sum(sizes.values()):,}, most of "
            f"them in {longest!r:.50}"
        )


def starts(path: Path, that_count: bool = False) -> list[dict[str, Any]]:
    """Return the record of each start of a run; [] if the run has no config.toml yet.

    Args:
        path: the run's config.toml.
        that_count: leave out those whose iterations a later start has made again.

    Raises:
        ValueError: if the file cannot be read, or is not one that a run has written.
    """
    found = files.read_toml(path, "config").get("record") if path.exists() else []
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get("versions", {}), dict) for one in found
    ):
        raise ValueError(
            f"config {path} must have a table [[record]] for each start of the run: put the run's "
            f"own file back, or remove it"
        )
    if not that_count:
        return found
    kept: list[dict[str, Any]] = []
    for one in found:
        at, its = one.get("iteration"), one.get("settings")
        if type(at) is not int or not isinstance(its, Mapping):
            raise ValueError(
                f"{path}: each table [[record]] must have iteration, a whole number, and settings; put the run's own "
                f"file back"
            )
        kept = [each for each in kept if each["iteration"] < at] + [one]
    return kept


def write(
    path: Path, settings: Mapping[str, Any], record: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Write the settings that are not None as a file for --config, with a table [[record]] for every start.

    Args:
        path: the run's config.toml.
        settings: option -> value.
        record: `machine.provenance` of this start.

    Returns:
        The records of all starts. The first start comes first.

    Raises:
        ValueError: if a resume could not read the file.
    """
    kept = {k: v for k, v in settings.items() if v is not None}  # TOML has no None
    records = [*starts(path), record]
    text = tomli_w.dumps({**kept, "record": records})
    # What cannot be read again is refused before the run begins.
    _check_length(kept, path)
    files.parse_toml(text, path, "config")
    files.write(path, text.encode())
    return records
