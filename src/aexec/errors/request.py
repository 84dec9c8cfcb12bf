"""You mend the request; all others go on."""

from __future__ import annotations

from aexec.errors.root import AexecError

__all__ = ("InvalidRequest", "QueueFull", "RequestAborted", "RequestError", "RequestFailed", "RequestTimeout")


class RequestError(AexecError):
    """One request ends; all others go on."""


class InvalidRequest(RequestError, ValueError):
    """A prompt or a sampling value is wrong; the text names value, expectation and remedy."""


class RequestAborted(RequestError):
    """The engine was closed before the request had finished.

    An abort by the request's id is no error: its stream ends with the finish reason ``abort``.
    """


class QueueFull(RequestError):
    """As many requests wait as may wait: try again later.

    Attributes:
        request_id: The request that was turned away.
        limit: How many may wait.
        what: They, and what they do.
        setting: Whose value the limit is.
        num_samples: How many the request stands for; beyond the limit there is never room for it.
    """

    def __init__(
        self,
        request_id: str,
        limit: int,
        what: str = "requests are waiting",
        setting: str = "max_num_waiting",
        num_samples: int = 1,
    ) -> None:
        super().__init__(request_id, limit, what, setting, num_samples)
        self.request_id, self.limit, self.what, self.setting = request_id, limit, what, setting
        self.num_samples = num_samples

    def __str__(self) -> str:
        if self.num_samples > self.limit:
            return (
                f"request {self.request_id} was turned away: each of its n={self.num_samples} samples waits as one "
                f"request, and at most {self.limit} may wait: ask for a lower n, or open the engine with a larger "
                f"{self.setting}"
            )
        return (
            f"request {self.request_id} was turned away, as {self.limit} {self.what} already: "
            f"send it again later, or open the engine with a larger {self.setting}"
        )


class RequestFailed(RequestError):
    """The model could not go on with this request, as with logits that are not numbers."""


class RequestTimeout(RequestError, TimeoutError):
    """The request took longer than its ``timeout``; what it has said was handed out before.

    Attributes:
        request_id: The request.
        seconds: Its timeout.
        num_tokens: New tokens that it had.
        status: Where it was, as in ``running`` or ``waiting``.
    """

    def __init__(self, request_id: str, seconds: float, num_tokens: int, status: str) -> None:
        super().__init__(request_id, seconds, num_tokens, status)
        self.request_id, self.seconds, self.num_tokens, self.status = request_id, seconds, num_tokens, status

    def __reduce__(self) -> tuple[type[RequestTimeout], tuple[str, float, int, str]]:  # an OSError keeps two arguments
        return type(self), (self.request_id, self.seconds, self.num_tokens, self.status)

    def __str__(self) -> str:
        return (
            f"request {self.request_id} took longer than its timeout of {self.seconds:g} s: it was {self.status}, "
            f"with {self.num_tokens} new token(s)"
        )
