"""Errors in vLLM's statuses and shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from recipe.policy_cpu.engine import EngineDead


class ApiError(Exception):
    """A request that is refused. type: BadRequestError, NotFoundError, InvalidUserInput or InternalServerError."""

    def __init__(self, message: str, type: str = "BadRequestError", status: int = 400, param: str | None = None):
        super().__init__(message)
        self.message, self.type, self.status, self.param = message, type, status, param


class FieldError(ValueError):
    """A field has a value that the contract does not allow; raised while a request body is validated."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


def error_response(message: str, type: str, status: int, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": type, "param": param, "code": int(status)}
    return JSONResponse({"error": error}, status_code=status)


def _on_api_error(request: Request, error: ApiError) -> JSONResponse:
    return error_response(error.message, error.type, error.status, error.param)


def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    return error_response(str(error.detail), HTTPStatus(error.status_code).phrase, error.status_code)


def _on_invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
    found = error.errors()
    causes = [e.get("ctx", {}).get("error") if isinstance(e.get("ctx"), dict) else None for e in found]
    param = next((cause.param for cause in causes if isinstance(cause, FieldError)), None)
    if param is None and found:
        param = ".".join(str(part) for part in found[0].get("loc", ()) if "[" not in str(part))
    lines = [f"  {e.get('loc')}: {e.get('msg')}" for e in found[:10]]
    message = f"{len(found)} validation error{'' if len(found) == 1 else 's'}:\n" + "\n".join(lines)
    return error_response(message, HTTPStatus.BAD_REQUEST.phrase, 400, param)


def _on_dead_engine(request: Request, error: EngineDead) -> JSONResponse:
    return error_response(str(error), "InternalServerError", 500)


def install(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(EngineDead, _on_dead_engine)
