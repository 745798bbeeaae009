"""Pipelines as graphs: fields, nodes, contracts, the pipeline builder, and `bind`. No torch here."""

from distflow.graph.bind import BoundNode, BoundPipeline
from distflow.graph.contract import REQUIRED, Form
from distflow.graph.fields import Field, PipelineError, find_field, register_field
from distflow.graph.node_spec import SCORE_FIELDS, NodeRole, NodeType, node, node_factory, spec_of
from distflow.graph.nodes import Drop, Node, NodeOutput
from distflow.graph.task_graph import Pipeline, TaskGraph, pipeline_from_config

__all__ = [
    "REQUIRED",
    "SCORE_FIELDS",
    "BoundNode",
    "Drop",
    "Field",
    "Form",
    "Node",
    "NodeOutput",
    "NodeRole",
    "NodeType",
    "Pipeline",
    "PipelineError",
    "BoundPipeline",
    "TaskGraph",
    "find_field",
    "node",
    "node_factory",
    "pipeline_from_config",
    "register_field",
    "spec_of",
]
