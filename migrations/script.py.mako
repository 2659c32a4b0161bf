"""
${message}
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from millpond.statestore.errors import InvalidError

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """
    ${message}
    """
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """
    Refused: an older release would not understand what newer ones wrote.
    """
    raise InvalidError("the catalog is rebuilt from the log, not downgraded")
