"""The entry of every public function: empty arguments are refused, and credentials in arguments are remembered.

An unset shell variable would make the current folder of a path, and a default of a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from inspect import Parameter, signature
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from ckpt_tools.core.format_names import FORMAT_BY_FILE_SUFFIX
from ckpt_tools.core.option_names import WRITTEN_FORMATS, format_option, format_with_aliases, is_location, resolve_alias
from ckpt_tools.errors import UsageError
from ckpt_tools.process.credentials import mask_raised_errors, remember_secrets

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

_SCHEMES_WITH_HOST = "s3|s3a|gs|gcs|az|abfs|abfss|adl|oss|oci|http|https|ftp|sftp|ssh|hf"
"""URL schemes whose first part names a bucket, container, host or repository."""

_URL_WITHOUT_LOCATION = re.compile(
    rf"(?:.*::)?(?:[A-Za-z][A-Za-z0-9+.-]*://|(?:{_SCHEMES_WITH_HOST}):///.*)", re.DOTALL
)
"""A URL that ends behind its scheme, or has no host."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def api_function(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function``, which raises UsageError if one of its arguments is empty, and whose errors show no credential.

    Every public function is decorated.
    """

    @wraps(function)
    def call_checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        parameters = signature(function).parameters
        positional_values = [
            resolve_alias(name, _materialize_iterator(each))
            for each, name in zip_longest(args, [*parameters][: len(args)])
        ]
        keyword_values = {name: resolve_alias(name, _materialize_iterator(each)) for name, each in kwargs.items()}
        values_by_name = {**dict(zip(parameters, positional_values, strict=False)), **keyword_values}
        # Before any check, so that the error about an unknown keyword is masked too.
        remember_secrets(values_by_name.values(), values_by_name.get("storage_options"))
        with mask_raised_errors():
            for name, value in values_by_name.items():
                if name not in parameters:
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
                check_not_empty(format_option(name), value, is_required=is_location(name))
            if values_by_name.get("storage_options"):
                _check_names_store(values_by_name.values())
            return function(*positional_values, **keyword_values)

    return call_checked


def _check_names_store(values: Iterable[object]) -> None:
    """Raises UsageError if no argument is the URL of a store, for which storage options could be."""
    places = chain.from_iterable(each if isinstance(each, list | tuple) else (each,) for each in values)
    if not any(isinstance(place, str | Path) and is_remote(place) for place in places):
        raise UsageError.of(
            "storage_options",
            f"{format_option('storage_options')} is for URLs of stores, such as s3://bucket/folder; "
            f"only local paths are named here",
        )


def is_remote(url: str | Path) -> bool:
    """True for a URL of another scheme than ``file``."""
    return "://" in str(url) and len(scheme := urlsplit(str(url)).scheme) > 1 and scheme != "file"


_WITHOUT_SCHEME = re.compile(r"//+[^/]*@|[^/:]+:[^/]+@")
"""``//user:password@host`` or ``user:password@host``."""


def check_has_scheme(destination: str | Path) -> None:
    """Raises UsageError for what looks like a URL without its scheme: it would become a folder of this name."""
    if _WITHOUT_SCHEME.match(str(destination)):
        raise UsageError(
            f"{destination} looks like a URL without its scheme, such as s3:// or sftp://; add it, or ./ in front if "
            "a local folder has this name"
        )


def expand_keywords(keywords: type, defaults: type) -> Callable[[Function], Function]:
    """Completes the ``help`` of a function that ends with ``**options: Unpack[KEYWORDS]``.

    The signature gets every keyword of that TypedDict, with the default of the same field of the dataclass
    ``defaults``; ``{formats}`` and ``{endings}`` in the docstring become the lists of them.
    """

    def decorate(function: Function) -> Function:
        declared_signature = signature(function)
        declared_parameters = [
            each for each in declared_signature.parameters.values() if each.kind is not Parameter.VAR_KEYWORD
        ]
        fields = defaults.__dataclass_fields__  # type: ignore[attr-defined]
        keyword_parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=kind.__forward_arg__)
            for name, kind in keywords.__annotations__.items()
        ]
        docstring = (function.__doc__ or "").replace("{endings}", ", ".join(FORMAT_BY_FILE_SUFFIX))
        function.__doc__ = docstring.replace("{formats}", format_with_aliases("to", WRITTEN_FORMATS))
        function.__signature__ = declared_signature.replace(parameters=[*declared_parameters, *keyword_parameters])  # type: ignore[attr-defined]
        return function

    return decorate


def check_not_empty(label: str, value: object, *, is_required: bool = False) -> None:
    """Raises UsageError if the argument that messages call ``label`` is empty, contains an empty string, or is a URL
    without a place or with brackets that do not match."""
    texts = list(_list_texts(value))
    if value == "" or (is_required and "" in texts):
        raise UsageError(f"{label} is empty" + ("; name a folder or a URL" if is_required else ""))
    if "" in texts:
        raise UsageError(f"{label} contains an empty text")
    url_without_location = next((text for text in texts if _URL_WITHOUT_LOCATION.fullmatch(text)), None)
    if url_without_location is not None:
        raise UsageError(
            f"{label}: {url_without_location} is a URL without a place; name a bucket, a host or a path in it"
        )
    for text in filter(_URL.match, texts):
        try:
            urlsplit(text)
        except ValueError as error:
            raise UsageError(f"{label}: {text} is not a URL: {error}") from error


def _list_texts(value: object) -> Iterable[str]:
    if isinstance(value, Mapping):
        return [text for pair in value.items() for text in pair if isinstance(text, str)]
    items: Iterable[object] = value if isinstance(value, list | tuple | set | frozenset) else (value,)
    return [text for text in items if isinstance(text, str)]


def _materialize_iterator(value: Any) -> Any:
    """``value`` as it can be read twice."""
    return tuple(value) if isinstance(value, Iterator) else value
