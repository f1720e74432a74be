"""Credentials that must show up nowhere, the places where a user may put them, and how they are found again."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from traceback import format_exception
from urllib.parse import quote, quote_plus, unquote

PORT = "127.0.0.1:9"
"""The port of the service discard, which nothing listens on."""


@dataclass(frozen=True, slots=True)
class Given:
    """A URL with the options and the environment that belong to it, one of which has the canary."""

    url: str
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @property
    def typed(self) -> list[str]:
        """The words of a command line behind the URL."""
        return [word for pair in self.options.items() for word in ("--storage-option", "=".join(pair))] + [*self.words]


CANARIES = {
    "plain": "Canary7Zx9Qp4Lm2",
    "short": "Cn4ry",
    "token": "hf_CanaryAbCdEfGhIjKlMnOpQr",
    "encoded": "Can4ry%2FQq%2Bp%3Dz%25s%23Rt%3Fuvwxyz%40Abc%3A9",
    "lower": "can4ry%2fqq%2bzz%40yx%c3%a4wv",
    "letters": "Can%34%72y5Zx9Qp4Lm2",
    "key": "Can4ryXUtnFEMI+K7MDENGbPxRfiCY==",
}
"""As they are typed in a URL."""

RAW = {
    "slashes": "Can4ryEMI/K7MDENG/bPxRfiCY",
    "delimiters": "Can4ry/Qq+p=z@wvutsr:xyz?abcdef#ghijkl",
    "quotes": "Can4ry'Qä\"p\\zw&xyz",
    "blank": "Can4ry 7Zx9 Qp4Lm2",
}
"""Passwords that should have been encoded, and were not."""

URLS: dict[str, Callable[[str], Given]] = {
    f"{name}": (lambda secret, url=url: Given(url.replace("{}", secret)))  # type: ignore[misc]
    for name, url in {
        "s3": "s3://AKIA4711:{}@bucket/run",
        "s3 without a host": "s3://AKIA4711:{}/bucket",
        "S3": "S3://AKIA4711:{}@bucket/run",
        "https": f"https://user:{{}}@{PORT}/model.pt",
        "http without a port": "http://user:{}@localhost.invalid/model.pt",
        "http without a host": "http://user:{}/model.pt",
        "memory": "memory://user:{}@x/y",
        "hf": "hf://user:{}@datasets/u/r",
        "hf in the path": "hf://datasets/u:{}@r/x",
        "hf model": "hf://user:{}@models/a/b@main/model.safetensors",
        "ftp": f"ftp://user:{{}}@{PORT}/x",
        "sftp": f"sftp://user:{{}}@{PORT}/x",
        "gs": "gs://user:{}@bucket/x",
        "az": "az://user:{}@container/x",
        "abfs": "abfs://user:{}@account.dfs.core.windows.net/x",
        "file": "file://user:{}@host/x",
        "unknown": "nothing://user:{}@x/y",
        "unknown, mistyped": "htps://user:{}@host/model.pt",
        "chained": f"simplecache::https://user:{{}}@{PORT}/model.pt",
        "chained twice": f"zip://model.pt::simplecache::https://user:{{}}@{PORT}/a.zip",
        "chained first": f"memory://user:{{}}@x::https://{PORT}/a.zip",
        "one slash": "s3:/AKIA4711:{}@bucket/run",
        "one slash, unknown": "htps:/user:{}@host/model.pt",
        "no slash": "s3:AKIA4711:{}@bucket/run",
        "three slashes": "s3:///AKIA4711:{}@bucket/run",
        "no colon": "s3//AKIA4711:{}@bucket/run",
        "no colon, unknown": "htps//user:{}@host/model.pt",
        "semicolon": "s3;//AKIA4711:{}@bucket/run",
        "backslashes": "s3:\\\\AKIA4711:{}@bucket/run",
        "no scheme": "user:{}@host/model.pt",
        "empty scheme": "://user:{}@host/model.pt",
        "only slashes": "//user:{}@host/model.pt",
        "blank in the scheme": "s 3://AKIA4711:{}@bucket/run",
        "latest": "memory://user:{}@x/y@latest",
        "latest of a mistyped": "s3:/AKIA4711:{}@bucket/run@step=7",
    }.items()
}
"""URLs with a password."""

ENCODED: dict[str, Callable[[str], Given]] = {
    **{
        name: (lambda secret, url=url: Given(url.replace("{}", secret)))  # type: ignore[misc]
        for name, url in {
            "name alone": f"https://{{}}@{PORT}/model.pt",
            "name alone, memory": "memory://{}@x/y",
            "name alone, hf": "hf://{}@datasets/u/r",
            "name alone, mistyped": "s3:/{}@bucket/run",
            "signature": f"http://{PORT}/model.pt?X-Amz-Expires=60&X-Amz-Signature={{}}&x=1",
            "signature, memory": "memory://x/model.pt?X-Amz-Signature={}",
            "credential": f"http://{PORT}/model.pt?X-Amz-Credential={{}}",
            "sas": f"http://{PORT}/model.pt?sv=2024&sig={{}}",
            "token": f"http://{PORT}/model.pt?token={{}}",
            "unknown scheme": "nothing://x/model.pt?access_token={}",
            "fragment": f"http://{PORT}/model.pt#key={{}}",
            "chained": f"simplecache::http://{PORT}/model.pt?token={{}}",
        }.items()
    },
    "endpoint": lambda secret: Given(
        "s3://bucket/run", {"endpoint_url": f"http://user:{secret}@{PORT}", "retries": "0"}
    ),
    "endpoint without a port": lambda secret: Given(
        "s3://bucket/run", {"endpoint_url": f"http://user:{secret}@", "retries": "0"}
    ),
    "endpoint without a scheme": lambda secret: Given(
        "s3://bucket/run", {"endpoint_url": f"user:{secret}@{PORT}", "retries": "0"}
    ),
    "endpoint of the environment": lambda secret: Given(
        "s3://bucket/run", {"retries": "0"}, {"AWS_ENDPOINT_URL": f"http://user:{secret}@{PORT}"}
    ),
    "endpoint of the environment without a scheme": lambda secret: Given(
        "s3://bucket/run", {"retries": "0"}, {"AWS_ENDPOINT_URL_S3": f"user:{secret}@{PORT}"}
    ),
    "proxy": lambda secret: Given(
        "s3://bucket/run",
        {"retries": "0", "endpoint_url": "http://host.invalid"},
        {"HTTP_PROXY": f"http://user:{secret}@{PORT}", "http_proxy": f"http://user:{secret}@{PORT}"},
    ),
}
"""Places in which a credential is encoded, if it has characters that a URL does not."""

_LOCAL = {"endpoint_url": f"http://{PORT}", "retries": "0"}

OPTIONS: dict[str, Callable[[str], Given]] = {
    "secret": lambda secret: Given("s3://bucket/run", {**_LOCAL, "key": "x", "secret": secret}),
    "token": lambda secret: Given("s3://bucket/run", {**_LOCAL, "key": "x", "secret": "y", "token": secret}),
    "key alone": lambda secret: Given("s3://bucket/run", {"key": secret}),
    "unknown": lambda secret: Given("s3://bucket/run", {"password": secret}),
    "number": lambda secret: Given("s3://bucket/run", {"retries": secret}),
    "truth": lambda secret: Given("s3://bucket/run", {"anon": secret}),
    "style": lambda secret: Given("s3://bucket/run", {"addressing_style": secret}),
    "of fsspec": lambda secret: Given(f"http://{PORT}/model.pt", {"password": secret}),
    "of memory": lambda secret: Given("memory://x/y", {"secret": secret}),
    "of a local path": lambda secret: Given("no/such/folder", {"secret": secret}),
    "secret of the environment": lambda secret: Given("s3://bucket/run", _LOCAL, {"AWS_SECRET_ACCESS_KEY": secret}),
}

MISTYPED: dict[str, Callable[[str], Given]] = {
    "no name": lambda secret: Given("s3://bucket/run", words=("--storage-option", secret)),
    "no name, with =": lambda secret: Given("s3://bucket/run", words=(f"--storage-option={secret}",)),
    "a blank for =": lambda secret: Given("s3://bucket/run", words=("--storage-option", "secret", secret)),
    "twice": lambda secret: Given("s3://x/y", words=("--storage-option", f"secret={secret}") * 2),
    "a name of no option": lambda secret: Given("s3://x/y", words=("--storage-option", f"{secret}=")),
    "a word too many": lambda secret: Given("x", words=("y", "z", f"s3://user:{secret}@x")),
    "no such option": lambda secret: Given("x", words=(f"--nothing=s3://user:{secret}@x",)),
    "no choice": lambda secret: Given("x", words=("--dtype", f"s3://user:{secret}@x")),
    "a file": lambda secret: Given("x", words=("--key-map", f"https://user:{secret}@{PORT}/map.json")),
}
"""Mistakes that only a command line can have."""


def spellings(canary: str) -> Iterator[str]:
    """All forms of a credential in which a message could have it, in lower case."""
    for text in {canary, unquote(canary)}:
        encoded = {text, quote(text), quote(text, safe=""), quote_plus(text), quote(quote(text, safe=""), safe="")}
        escaped = {repr(text)[1:-1], json.dumps(text)[1:-1], escape(text), text.encode("unicode_escape").decode()}
        for each in encoded | escaped | {b64encode(f"user:{text}".encode()).decode().rstrip("=")}:
            yield each.lower()


def leaks(canary: str, text: str) -> list[str]:
    """The spellings of ``canary`` that ``text`` has."""
    lowered = text.lower()
    return [each for each in spellings(canary) if each in lowered]


def shown_by(error: BaseException) -> str:
    """All that a program can show of an error and of those behind it."""
    texts = ["".join(format_exception(error))]
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        texts += [str(each), repr(each), repr(each.args), repr(vars(each))]
        waiting += [each.__cause__, each.__context__]
    return "\n".join(texts)
