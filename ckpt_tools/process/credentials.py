"""Credentials: found in arguments and in the environment, and replaced by ``***`` in text, errors and output.

Two rules mask a text. By shape: what stands before the host of a URL and behind its path, and parameters of signed
addresses. By value: each credential of an argument is remembered, and is masked wherever it occurs, because libraries
repeat parts of a URL alone, decoded or encoded. ``docs/stores.md`` says what counts as a credential.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple, TextIO
from urllib.parse import unquote, unquote_plus

MASK = "***"

MIN_CHARS = 8
"""Shorter values are masked in their URL alone, because they occur in words, names of tensors and keys of JSON. So are
shorter parts of a password between the delimiters of URLs."""

MIN_TOKEN_CHARS = 16
"""Length of a name before a password that is taken for a key: names of users, which may be folders too, are shorter."""

MAX_ERROR_CHARS = 1 << 14
"""Longest message or value that an error of a library may keep."""

MAX_REMEMBERED = 1000
"""Values that a process remembers; the oldest are forgotten first."""

_SHOWN_OPTION_NAMES = """
    endpoint_url endpoint region region_name profile account_name project username user host
    protocol target_protocol repo_type revision requester_pays
"""

_SHOWN_OPTIONS = frozenset(_SHOWN_OPTION_NAMES.split())
"""Options of stores whose values are shown, if they are names. Numbers and truth values are shown too."""

_PLAIN_VALUE = re.compile(r"(?i)true|false|none|yes|no|auto|path|virtual|[-+]?\d{0,7}(?:\.\d*)?(?:e-?\d)?")

_PLAIN_NAME = re.compile(r"[\w.-]+(?::\d+)?")

_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]*")

_LOGIN_SCHEME_NAMES = "sftp ssh scp ftp ftps smb hdfs webhdfs abfs abfss wasb wasbs"

_LOGIN_SCHEMES = frozenset(_LOGIN_SCHEME_NAMES.split())
"""Schemes whose URLs have the name of a user or container before ``@``."""

_WEB_SCHEMES = frozenset(("http", "https"))

_OTHER_SCHEME_NAMES = "s3 s3a s3n gs gcs az adl oss oci hf memory file webdav"

_SCHEMES = (*_LOGIN_SCHEMES, *_WEB_SCHEMES, *_OTHER_SCHEME_NAMES.split())

_SECRET_PARAMETER_REGEX = r"""
    x-(?:amz|goog|oss|cos)-(?:signature|credential|security-token) | awsaccesskeyid | signature | sig | sas
    | (?:[a-z]+[_-])?(?:token|secret|password|passwd|pwd|key|auth|credentials?|code|policy)
    | (?:[a-z]+[_-])?[a-z]*sess(?:ion)?(?:[_-]?id)?
"""

# The three patterns made of it are text, which `re` compiles, and keeps, for the first URL: most commands have none.
_PATH_PARAMETER = rf"(?xi)(;(?:{_SECRET_PARAMETER_REGEX})=)[^\s&;/?#'\"]+"

_SECRET_PARAMETER = f"(?xi){_SECRET_PARAMETER_REGEX}"

_SECRET_VARIABLE = re.compile(
    r"(?:^|.*_)(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CONNECTION_STRING"
    r"|(?:ACCESS|ACCOUNT|STORAGE|API|PRIVATE|SECRET)_KEY)",
    re.I,
)
"""Environment variables with a credential of a store, such as ``AWS_SECRET_ACCESS_KEY`` and ``HF_TOKEN``."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)

_ADDRESS_VARIABLE = re.compile(r".*_(?:URL|URI|ENDPOINT|PROXY)(?:_[A-Z0-9]+)?", re.I)
"""Environment variables with the address of a service, such as ``AWS_ENDPOINT_URL_S3``."""

# before:  scheme://user:password@          address: what stands before ? or # of a URL
# name:    ?token= or &signature=           bare:    X-Amz-Signature= without ? or & before it
_SECRET_SHAPE = rf"""(?xi)
        (?P<before>[a-z][a-z0-9+.-]{{0,40}}:/(?:/+|(?=[^\s/?#:@'"]+:[^\s@'"]{{0,1024}}@)))(?!\*\*\*@)
        # user:password@, also if a slash is in the password
        (?:[^\s/?#@'"]*|[^\s/?#:@'"]+:(?!\d+[/?#])[^\s@'"]{{0,1024}}(?:@[^\s/@'"]*)*)@
      | (?P<address>https?://[^\s?#'"]{{0,1024}}[?\#](?=[^\s'"])
          | [a-z][a-z0-9+.-]{{0,40}}://[^\s?#'"]{{0,1024}}[?\#](?=[^\s'"]{{0,1024}}=))
        (?:[^\s'"]*[^\s'".,:;)\]])?
      | (?P<name>[?&;](?:{_SECRET_PARAMETER_REGEX})=)(?!\*\*\*)[^\s&;'"]+
      | (?P<bare>X-Amz-(?:Signature|Credential|Security-Token)=)(?!\*\*\*)[^\s&;'"]+
"""
"""Bounded, so that time is linear in a text that a checkpoint chose."""


class _SecretPattern(NamedTuple):
    """A value that is masked. ``anchor`` is in each of its spellings, in lower case."""

    anchor: str
    pattern: re.Pattern[str]


_remembered_secrets: dict[str, _SecretPattern] = {}
_secrets_longest_first: tuple[_SecretPattern, ...] = ()
_secrets_lock = threading.Lock()


def mask_secrets(text: str) -> str:
    """``text`` with ``***`` for every credential. The rest of a URL is as it was."""
    if _secrets_longest_first:  # the longest first, so that none is cut by one that is a part of it
        lowered = text.lower()
        for secret in _secrets_longest_first:
            if secret.anchor in lowered:
                text = secret.pattern.sub(MASK, text)
    if ":/" in text or "?" in text or "&" in text or "X-Amz-" in text:
        # Twice, because the first pass may uncover the beginning of another URL.
        return re.sub(_SECRET_SHAPE, _mask_match, re.sub(_SECRET_SHAPE, _mask_match, text))
    return text


def _mask_match(match: re.Match[str]) -> str:
    if match["before"]:
        return f"{match['before']}{MASK}@"
    address = re.sub(_PATH_PARAMETER, rf"\1{MASK}", match["address"] or "")
    return f"{address or match['name'] or match['bare']}{MASK}"


_RANDOM_TOKEN = re.compile(r"(?=.*\d)[\w+%=~-]{20,}")
"""A long value of letters and digits: the name of a file or a type has dots or slashes."""


# What is remembered


def remember_secrets(values: Iterable[object] = (), storage_options: object = None) -> None:
    """Remember the credentials of arguments, of storage options and of the environment."""
    for value in values:
        for text in value if isinstance(value, list | tuple | set | frozenset) else (value,):
            if isinstance(text, str | PathLike):
                _remember_url(str(text))
    if isinstance(storage_options, Mapping):
        _remember_options(storage_options)
    for name, text in os.environ.items():
        if _SECRET_VARIABLE.fullmatch(name) and len(text) >= MIN_CHARS:
            _remember_text(text)
        if _ADDRESS_VARIABLE.fullmatch(name) or _URL.match(text):
            _remember_url(text)


def remember_secrets_in_words(words: Iterable[str]) -> None:
    """Remember the credentials on a command line."""
    words = list(words)
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        next_words = words[number + 1 : number + 2]
        if number and words[number - 1] == _STORAGE_FLAG:
            _remember_option_pair(word, next_words)
        elif flag == _STORAGE_FLAG and equals:
            _remember_option_pair(value, next_words)
        elif _SECRET_FLAG.fullmatch(flag):
            for secret in (value,) if equals else next_words:
                if not _is_file_argument(secret):
                    _remember_secret(secret)
        else:
            remember_secrets((word, value))
    remember_secrets()


def _is_file_argument(word: str) -> bool:
    """Whether ``word`` is the file that an option asks for, or a mistyped one, and not the secret itself."""
    return os.path.exists(word) or word.startswith(("/", "./", "../", "~"))  # noqa: PTH110


_STORAGE_FLAG = "--storage-option"

_SECRET_FLAG = re.compile(r"--(?:[a-z]+-)*(?:token|secret|password|passphrase|(?:private|access|api)-key)")
"""Options that are the name of a secret, whether there is one or not."""


def _remember_option_pair(pair: str, next_words: list[str]) -> None:
    """Remember ``NAME=VALUE``. Without ``=``, or with another name, each word may be the secret."""
    name, equals, value = pair.partition("=")
    if equals and _OPTION_NAME.fullmatch(name):
        _remember_options({name: value})
        return
    for word in (pair, name, value, *([] if equals else next_words)):
        _remember_secret(word)


def _remember_options(options: Mapping[Any, Any]) -> None:
    """Remember the values of storage options, and of the options within an option."""
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Mapping):
                _remember_options(each)
            elif isinstance(each, str) and "://" in each:
                _remember_url(each)
            elif isinstance(each, str) and not (name in _SHOWN_OPTIONS and _PLAIN_NAME.fullmatch(each)):
                _remember_secret(each)


def _remember_secret(text: str) -> None:
    """Remember a whole secret, and the parts that a URL's delimiters make of it."""
    if _PLAIN_VALUE.fullmatch(text):
        return
    for each in {text, unquote(text), unquote_plus(text)}:
        _remember_text(each)
        for part in re.split(r"[\s/\\?#@:&;=%]+", each):
            if len(part) >= MIN_CHARS:
                _remember_text(part)


def _remember_text(text: str, suffix: str = "") -> None:
    """Remember ``text``; with ``suffix``, only before that."""
    if len(text) < MIN_CHARS and not suffix:
        return
    global _secrets_longest_first
    key = text + suffix
    with _secrets_lock:
        if key in _remembered_secrets:
            _remembered_secrets[key] = _remembered_secrets.pop(key)
            return
        _remembered_secrets[key] = _compile_secret(text, suffix)
        if len(_remembered_secrets) > MAX_REMEMBERED:
            del _remembered_secrets[next(iter(_remembered_secrets))]
        _secrets_longest_first = tuple(
            _remembered_secrets[each] for each in sorted(_remembered_secrets, key=len, reverse=True)
        )


def _compile_secret(text: str, suffix: str) -> _SecretPattern:
    pattern = "".join(map(_build_spelling_regex, text))
    if suffix:
        pattern = rf"(?<!\w){pattern}(?={'|'.join(map(_build_spelling_regex, suffix))})"
    alphanumeric_runs = re.findall(r"[a-z0-9]+", text.lower())
    return _SecretPattern(max(alphanumeric_runs, key=len, default=""), re.compile(pattern, re.I))


def _build_spelling_regex(character: str) -> str:
    """A pattern for a character as it is, percent-encoded once or twice, and as an escape of Python, JSON or HTML."""
    if character.isascii() and character.isalnum():
        return character
    spellings = [re.escape(character), "".join(f"%(?:25)?{byte:02x}" for byte in character.encode(errors="replace"))]
    spellings += [re.escape(each) for each in _ESCAPES.get(character, ())]
    if not character.isprintable() or not character.isascii():
        spellings.append(re.escape(character.encode("unicode_escape").decode()))
        spellings.append(re.escape(f"\\u{ord(character):04x}"))
    return f"(?:{'|'.join(spellings)})"


_ESCAPES = {
    " ": ("+",),
    "&": ("&amp;",),
    "<": ("&lt;",),
    ">": ("&gt;",),
    "'": ("\\'", "&#x27;", "'\"'\"'"),
    '"': ('\\"', "&quot;"),
    "\\": ("\\\\",),
}


# URLs


_URL_START = re.compile(
    rf"""(?P<scheme>[^/\\@:]*):[/\\]+  # any URL
      | (?:[a-z][\w+.-]*)?[/\\]{{2}}  # without its scheme, or without the colon
      | (?P<mistyped>{"|".join(_SCHEMES)})(?:[:;][/\\]*|[/\\])
      | (?=[^\s/\\:@]+:[^/\\][^@]*@)  # user:password@host alone
    """,
    re.X | re.I,
)

_WINDOWS_DRIVE = re.compile(r"[a-z]:[/\\](?![/\\])", re.I)


def _remember_url(text: str) -> None:
    """Remember the credentials of a URL, or of what should be one; of ``a::b``, those of each."""
    for part in {text, *text.split("::")}:
        start = _URL_START.match(part)
        if start is None or _WINDOWS_DRIVE.match(part):
            continue
        scheme = (start["scheme"] or start["mistyped"] or "").strip().lower()
        userinfo, location = _split_userinfo(part[start.end() :])
        if userinfo is not None:
            _remember_userinfo(userinfo, is_login=scheme in _LOGIN_SCHEMES)
            if "@" not in part:  # taken for a port, which parsers quote
                _remember_text(userinfo.partition(":")[2], "'")
        if scheme == "hf":  # no name there has a colon, and @ is before the revision
            for user, password in re.findall(r"/([^/:@]+):([^@]+)@", f"/{location}"):
                _remember_secret(password)
                _remember_text(f"{user}:{password}", "@")
        for parameter in re.split("[;/]", re.split("[?#]", location)[0]):
            name, _, value = parameter.partition("=")
            if re.fullmatch(_SECRET_PARAMETER, name):
                _remember_secret(value)
        for mark in "?#":
            _remember_query(location.partition(mark)[2], scheme)


def _split_userinfo(schemeless_url: str) -> tuple[str | None, str]:
    """User information of a URL without its scheme, and the rest. A password may have any character."""
    authority = re.split("[/?#]", schemeless_url, maxsplit=1)[0]
    if "@" in authority:
        userinfo, _, host = authority.rpartition("@")
        return userinfo, host + schemeless_url[len(authority) :]
    user, colon, password = authority.partition(":")
    if not colon or not user or user == "arn" or user.startswith("[") or re.fullmatch(r"\d*", password):
        return None, schemeless_url
    match = re.match(r"[^@]*(?:@[^/@]*)*@", schemeless_url)
    if match is None:  # user:password without a host
        return authority, schemeless_url[len(authority) :]
    return match.group()[:-1], schemeless_url[match.end() :]


def _remember_userinfo(userinfo: str, *, is_login: bool) -> None:
    user, colon, password = userinfo.partition(":")
    if colon:
        _remember_secret(password)
        for pair in {userinfo, f"{unquote(user)}:{unquote(password)}"}:
            _remember_text(pair)
            _remember_text(b2a_base64(pair.encode(errors="surrogateescape")).decode().rstrip("=\n"))
    elif is_login:
        _remember_text(user, "@")
    if len(user) >= MIN_TOKEN_CHARS if colon else not is_login:
        _remember_secret(user)


def _remember_query(query: str, scheme: str) -> None:
    if "=" not in query and not (scheme in _WEB_SCHEMES and len(query) >= MIN_CHARS):
        return
    _remember_text(query)
    for pair in re.split("[&;#]", query):
        name, _, value = pair.partition("=")
        if re.fullmatch(_SECRET_PARAMETER, name) or _RANDOM_TOKEN.fullmatch(value):
            _remember_secret(value)


# Errors and output


class LibraryError(Exception):
    """Stands in a traceback for an error of a library that shows a credential."""


@contextmanager
def mask_raised_errors() -> Iterator[None]:
    """An error that leaves the block shows no credential, nor do the errors that it was raised from."""
    try:
        yield
    except BaseException as error:
        mask_error(error)
        raise


def mask_error(error: BaseException) -> None:
    """Mask credentials in the arguments of ``error``, and replace the errors behind it that show one."""
    _mask_arguments(error)
    _mask_causes(error, set())


def _mask_arguments(error: BaseException) -> None:
    error.args = tuple(map(_mask_value, error.args))
    if isinstance(error, OSError):
        error.filename, error.filename2 = _mask_value(error.filename), _mask_value(error.filename2)
    for name, value in vars(error).items():
        vars(error)[name] = [*map(_mask_value, value)] if isinstance(value, list) else _mask_value(value)


def _mask_value(value: Any) -> Any:
    """``value`` itself, or its text if that shows a credential."""
    text = value if isinstance(value, str) else _format_safely(value)
    masked = mask_secrets(text)
    return value if masked == text else masked


def _mask_causes(error: BaseException, seen_ids: set[int]) -> None:
    # Cause and context may be one object, and chains of them may be circles. Setting a cause suppresses the context.
    seen_ids.add(id(error))
    is_suppressed, replacements = error.__suppress_context__, {}
    for each in (error.__cause__, error.__context__):
        if each is not None and id(each) not in replacements:
            replacements[id(each)] = _replace_unsafe_error(each)
    if error.__cause__ is not None:
        error.__cause__ = replacements[id(error.__cause__)]
    if error.__context__ is not None:
        error.__context__ = replacements[id(error.__context__)]
    error.__suppress_context__ = is_suppressed
    for each in replacements.values():
        if id(each) not in seen_ids:
            _mask_causes(each, seen_ids)


def _replace_unsafe_error(error: BaseException) -> BaseException:
    """``error`` itself if it shows no credential, and holds no long data such as the text that a parser refused."""
    attribute_values = (*error.args, *vars(error).values())
    is_short = all(len(each) <= MAX_ERROR_CHARS for each in attribute_values if isinstance(each, str | bytes))
    if is_short and all(mask_secrets(text) == text for text in _iterate_error_texts(error)):
        return error
    replacement = LibraryError(
        mask_secrets(f"{type(error).__module__}.{type(error).__qualname__}: {_format_safely(error)[:MAX_ERROR_CHARS]}")
    )
    replacement.__traceback__, replacement.__cause__, replacement.__context__ = (
        error.__traceback__,
        error.__cause__,
        error.__context__,
    )
    replacement.__suppress_context__ = error.__suppress_context__
    return replacement


def _iterate_error_texts(error: BaseException) -> Iterator[str]:
    """Texts that a program can show of an error: its message, its arguments and its attributes."""
    for value in (error, *error.args, *vars(error).values()):
        yield value if isinstance(value, str) else _format_safely(value)
        yield _format_safely(value, repr)


def _format_safely(value: object, formatter: Callable[[object], str] = str) -> str:
    try:
        return formatter(value)
    except Exception:
        return ""


class _MaskedStream:
    """A text stream that masks credentials in what is written to it. It has no ``buffer``, which would not. Errors of
    standard output name it; those of standard error are ignored, as what is told there is not what was asked for."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        if text != "":  # click writes an empty text to learn what a stream takes
            with self._handle_stream_errors():
                self._stream.write(mask_secrets(text))
        return len(text)

    def flush(self) -> None:
        with self._handle_stream_errors():
            self._stream.flush()

    @contextmanager
    def _handle_stream_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Or what is left would fail again when Python ends, and have an exit code of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            error.filename = "standard output"
            if self._name == "stdout":
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self._stream, name)


def mask_output() -> None:
    """Mask credentials in all that this process prints from now on, also by libraries and in tracebacks. Characters
    that the encoding lacks become escapes. A stream that a caller put in the place of the process's own stays.

    A stream that is closed is opened so that its use fails. Otherwise the next file would get its number.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_WRONLY)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null_stream = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
            setattr(sys, name, null_stream)
            setattr(sys, f"__{name}__", null_stream)
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _MaskedStream(stream, name))
