"""Between gateways: responses that clients come back to are on the host that made them (`--responses-store`)."""

from mesh.wire.message import Message


class ReadResponse(Message, frozen=True):
    """Ask a gateway of the host that made it for a response. `owner` is the name of the API key that it belongs to,
    empty without keys: to others it is not there. With `delete` it is removed, and not sent.

    Errors: `store_unusable`, retryable.
    """

    response_id: str
    owner: str = ""
    delete: bool = False


class ResponseIs(Message, frozen=True):
    """Answer to `ReadResponse`, with two buffers if it `is_there` and was not deleted: the response, and the items of
    the conversation up to its end, both as JSON.
    """

    is_there: bool
