"""Files and command lines become dataclasses here; each room declares its own, and this room knows none of them."""
