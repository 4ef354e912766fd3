"""``DeepSpeedConfigModel``, the base class that scripts derive configurations of their own from.

Needs pydantic, which hf-zero itself does not.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict

from hf_zero.errors import ReplacedKeyError
from hf_zero.logging import logger


class DeepSpeedConfigModel(BaseModel):
    """A pydantic model that takes no key it does not know, and "auto" for what was not given.

    ``Field(..., json_schema_extra={"deprecated": True, "new_param": "other", "new_param_fn": f})``
    is a former key: what is given for it is f's argument, and the answer the value of the field
    ``other`` ("section.other": of a part). ``deprecated_msg`` is logged with it; with
    ``set_new_param: False`` it stays where it is. Raises ReplacedKeyError where both are given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if (
                isinstance(extra, dict)
                and extra.get("deprecated")
                and name in self.model_fields_set
            ):
                self._replace(name, extra)

    def _replace(self, name: str, extra: Any) -> None:
        """Give what was written for the former key ``name`` to the field that takes its place."""
        path = extra.get("new_param", "")
        instead, more = f"; write {path}" if path else "", extra.get("deprecated_msg", "")
        logger.warning("the key %s is deprecated%s. %s", name, instead, more)
        if not path or not extra.get("set_new_param", True):
            return
        *parts, new = path.split(".")
        holder = reduce(getattr, parts, self)
        if new in holder.model_fields_set:
            raise ReplacedKeyError(
                f"{name} and {path}, which has taken its place, are both given; remove {name}"
            )
        value = extra.get("new_param_fn", lambda given: given)(getattr(self, name))
        delattr(self, name)
        setattr(holder, new, value)
