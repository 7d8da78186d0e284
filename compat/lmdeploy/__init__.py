"""LMDeploy's Python interface: `from compat.lmdeploy import pipeline, GenerationConfig, TurbomindEngineConfig`."""

from compat.lmdeploy.api_client import APIClient, get_model_list
from compat.lmdeploy.configs import ChatTemplateConfig, GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig
from compat.lmdeploy.pipeline import Pipeline, pipeline
from compat.lmdeploy.session import Response, Session
from compat.lmdeploy.vl import load_image

__all__ = [
    "APIClient",
    "ChatTemplateConfig",
    "GenerationConfig",
    "Pipeline",
    "PytorchEngineConfig",
    "Response",
    "Session",
    "TurbomindEngineConfig",
    "get_model_list",
    "load_image",
    "pipeline",
]
