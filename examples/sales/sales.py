"""Made-up sales in the manner of CDNOW: customers of one quarter, and what they buy in a year and a half.

Most buy once or twice and never again; a few buy often. Equal seeds make equal tables.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

FIRST_DAY: Final = date(1997, 1, 1)
_DAYS: Final = 546
_QUARTER_DAYS: Final = 90
_REGIONS: Final = ("north", "east", "south", "west")
_TIME: Final = pa.timestamp("us", "UTC")
_MONEY: Final = pa.decimal128(9, 2)

SALES: Final = pa.schema(
    [
        ("sale", pa.int64()),
        ("customer", pa.string()),
        ("sold_at", _TIME),
        ("items", pa.int32()),
        ("amount", _MONEY),
    ]
)
CUSTOMERS: Final = pa.schema(
    [
        ("op", pa.string()),
        ("customer", pa.string()),
        ("region", pa.string()),
        ("since", pa.date32()),
        ("credit", _MONEY),
        ("changed_at", _TIME),
    ]
)
"""The changes of the table of customers: ``+I`` for a new row, ``-U`` and ``+U`` for a row before and after an update."""


def made_tables(customers: int, seed: int = 1) -> dict[str, pa.Table]:
    """Return the sales and the changes of the customers, each in the order of time."""
    rng = np.random.default_rng(seed)
    changes, sales = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(customers):
        row = _customer(rng, f"c{number:05}")
        changes.append({"op": "+I", **row})
        if rng.random() < 0.3:
            changes += _update(rng, row)
        sales += _sales(rng, row)
    sales.sort(key=lambda sale: (sale["sold_at"], sale["customer"]))
    # A customer's new row comes behind the old one of the same change.
    changes.sort(key=lambda change: (change["changed_at"], change["customer"]))
    numbered = [{"sale": number, **sale} for number, sale in enumerate(sales, 1)]
    return {
        "sales": pa.Table.from_pylist(numbered, SALES),
        "customers": pa.Table.from_pylist(changes, CUSTOMERS),
    }


def _customer(rng: np.random.Generator, name: str) -> dict[str, Any]:
    since = FIRST_DAY + timedelta(days=int(rng.integers(_QUARTER_DAYS)))
    return {
        "customer": name,
        "region": str(rng.choice(_REGIONS)),
        "since": since,
        "credit": _money(rng.integers(5_000, 100_000)),
        "changed_at": _midnight(since),
    }


def _update(rng: np.random.Generator, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a move to another region, with a new credit."""
    moved_on = row["since"] + timedelta(days=int(rng.integers(1, _DAYS - _QUARTER_DAYS)))
    after = {
        **row,
        "region": str(rng.choice(_REGIONS)),
        "credit": _money(rng.integers(5_000, 100_000)),
        "changed_at": _midnight(moved_on),
    }
    return [{"op": "-U", **row, "changed_at": after["changed_at"]}, {"op": "+U", **after}]


def _sales(rng: np.random.Generator, row: dict[str, Any]) -> list[dict[str, Any]]:
    # A customer returns with a chance of their own, and leaves for good at some time.
    returns = rng.beta(1.5, 1.5)
    sold_at, sales = row["changed_at"], list[dict[str, Any]]()
    while True:
        # Never at midnight, when customers change.
        day = sold_at.date() + timedelta(days=int(rng.exponential(40)) if sales else 0)
        sold_at = _midnight(day) + timedelta(microseconds=int(rng.integers(1, 86_400_000_000)))
        if day >= FIRST_DAY + timedelta(days=_DAYS):
            return sales
        items = int(rng.geometric(0.45))
        amount = _money(sum(rng.integers(499, 2_999, items).tolist()))
        sales.append({"customer": row["customer"], "sold_at": sold_at, "items": items, "amount": amount})
        if rng.random() > returns:
            return sales


def _money(cents: int) -> Decimal:
    return Decimal(int(cents)).scaleb(-2)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
