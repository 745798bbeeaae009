"""Programs as graphs: fields, nodes, contracts, the pipeline builder, and what `bind` makes of them. No torch here."""

from distflow.graph.contract import REQUIRED, SCORE_FIELDS, Contract, Form, canonical
from distflow.graph.errors import PipelineError
from distflow.graph.fields import ALIASES, STANDARD_FIELDS, Axis, Field, find_field, register_field
from distflow.graph.nodes import Drop, Node, NodeOutput
from distflow.graph.options import inert_keys
from distflow.graph.pipeline import Pipeline, pipeline_from_config
from distflow.graph.program import BoundNode, Program
from distflow.graph.roles import NodeRole, NodeStatus, NodeType, Scope
from distflow.graph.spec import NodeSpec, node, spec_of
from distflow.graph.task_graph import TaskGraph

__all__ = [
    "ALIASES",
    "REQUIRED",
    "SCORE_FIELDS",
    "STANDARD_FIELDS",
    "Axis",
    "BoundNode",
    "Contract",
    "Drop",
    "Field",
    "Form",
    "Node",
    "NodeOutput",
    "NodeRole",
    "NodeSpec",
    "NodeStatus",
    "NodeType",
    "Pipeline",
    "PipelineError",
    "Program",
    "Scope",
    "TaskGraph",
    "canonical",
    "find_field",
    "inert_keys",
    "node",
    "pipeline_from_config",
    "register_field",
    "spec_of",
]
