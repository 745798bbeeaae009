"""Pipelines as graphs: fields, nodes, contracts, the pipeline builder, and `bind`. Does not import
torch."""

from distflow.errors import PipelineError
from distflow.graph.bind_to_config import BoundNode, BoundPipeline
from distflow.graph.contract_from_signature import Form
from distflow.graph.fields import register_field
from distflow.graph.graph_node import Drop, Node, NodeOutput
from distflow.graph.node_roles import SCORE_FIELDS, NodeRole, NodeType
from distflow.graph.node_spec import node, node_factory
from distflow.graph.task_graph import Pipeline, TaskGraph, pipeline_from_config

__all__ = [
    "SCORE_FIELDS",
    "BoundNode",
    "Drop",
    "Form",
    "Node",
    "NodeOutput",
    "NodeRole",
    "NodeType",
    "Pipeline",
    "PipelineError",
    "BoundPipeline",
    "TaskGraph",
    "node",
    "node_factory",
    "pipeline_from_config",
    "register_field",
]
