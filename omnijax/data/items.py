"""Items: the rows of a source made ready to be packed, as a table. It imports no jax, so workers can make them."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from omnijax.data.documents import Documents, Table
from omnijax.data.omni_packing import Item
from omnijax.data.packing import Document, make_document
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow, UserError


class Items(Protocol):
    """A table of what a packer takes, each with its `tokens` and the number of its `source`.

    A frozen dataclass that pickles small: it says where rows are and what becomes of them, and holds neither.
    """

    @property
    def rows(self) -> Table[Any, Any]:
        """What the items are made of, one of each row."""
        ...

    def settings(self) -> dict[str, Any]:
        """What decides an item beside its row, as JSON."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """Raises `BadRow` for a row that cannot be used."""
        ...


@dataclass(frozen=True, eq=False)
class TextItems:
    """A `Document` of each text."""

    rows: Documents
    tokenizer: Tokenizer
    source: int = 0

    def settings(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.fingerprint}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        row_id = self.rows.row_id(index)
        try:
            return make_document(self.rows[index], row_id, self.tokenizer, self.source)
        except BadRow:
            raise
        except UserError as error:  # of a text that cannot be read, or has what the tokenizer cannot encode
            raise BadRow(row_id, str(error)) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # Anew, without what it keeps: a vocabulary that was loaded is much larger than the name of its file.
        tokenizer: Any = self.tokenizer
        bare = dataclasses.replace(tokenizer) if hasattr(tokenizer, "__dataclass_fields__") else tokenizer
        return type(self), (self.rows, bare, self.source)


@dataclass(frozen=True, eq=False)
class DocumentItems:
    """The documents of `texts` for a packer of whole samples, all of their tokens labels: text among chats."""

    texts: TextItems

    @property
    def rows(self) -> Documents:
        return self.texts.rows

    def settings(self) -> dict[str, Any]:
        return self.texts.settings()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Item:
        document = self.texts[index]
        trained = np.ones(document.tokens.size, np.bool_)
        return Item(document.tokens, trained, document.row_id, document.source, document=True)
