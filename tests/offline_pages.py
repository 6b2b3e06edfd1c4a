"""The data in pages that work offline: `manyheads.extras.inspect.drawings.pages`."""

import json
import re
from typing import Any


def record_of(page: str) -> Any:
    """Return the record that a page was made of."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])
