"""Episodes of several turns: a workflow talks to the policy through a chat, whose tokens are never
re-encoded."""

from distflow.environments.chat import Chat, ChatError, Prompt, Reply
from distflow.environments.workflows import Row, workflow
