"""Asks a mesh for vectors and ranks by other people's clients, in an environment that has them.

`python vectors.py URL QUERY DOCUMENT ...` prints, by client, the vectors of all documents, or the ranks by the query.
"""

import json
import sys
from typing import Any

import cohere
import litellm
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from openai import BadRequestError, OpenAI

litellm.suppress_debug_info = True
URL, QUERY, *DOCUMENTS = sys.argv[1:]
V1 = URL + "/v1"
KEY = "none"


def by_openai() -> list[list[float]]:
    # It asks for base64 unless told otherwise.
    client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
    return [one.embedding for one in client.embeddings.create(model="tiny", input=DOCUMENTS).data]


def by_openai_in_numbers() -> list[list[float]]:
    client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
    answer = client.embeddings.create(model="tiny", input=DOCUMENTS, encoding_format="float")
    return [one.embedding for one in answer.data]


def by_langchain() -> list[list[float]]:
    model = OpenAIEmbeddings(model="tiny", base_url=V1, api_key=KEY, check_embedding_ctx_length=False)
    return [*model.embed_documents(DOCUMENTS[:-1]), model.embed_query(DOCUMENTS[-1])]


def by_litellm(provider: str) -> list[list[float]]:
    answer = litellm.embedding(model=f"{provider}/tiny", input=DOCUMENTS, api_base=V1, api_key=KEY)
    return [one["embedding"] for one in answer.data]


def by_llama_index() -> list[list[float]]:
    model = OpenAILikeEmbedding(model_name="tiny", api_base=V1, api_key=KEY)
    return [*model.get_text_embedding_batch(DOCUMENTS[:-1]), model.get_text_embedding(DOCUMENTS[-1])]


def ranks(results: Any) -> list[tuple[int, float]]:
    return [(one["index"], one["relevance_score"]) for one in results]


def litellm_ranks(provider: str, base: str) -> list[tuple[int, float]]:
    answer = litellm.rerank(model=f"{provider}/tiny", query=QUERY, documents=DOCUMENTS, api_base=base, api_key=KEY)
    return ranks(answer.results)


def cohere_ranks(client: Any) -> list[tuple[int, float]]:
    answer = client.rerank(model="tiny", query=QUERY, documents=DOCUMENTS, top_n=len(DOCUMENTS))
    return [(one.index, one.relevance_score) for one in answer.results]


def llama_index_ranks() -> list[tuple[int, float]]:
    ranker = CohereRerank(api_key=KEY, model="tiny", top_n=len(DOCUMENTS), base_url=URL)
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(index))) for index, text in enumerate(DOCUMENTS)]
    return [(int(one.node.node_id), one.score) for one in ranker.postprocess_nodes(nodes, query_str=QUERY)]


def foreign_ids() -> str:
    """What langchain's embeddings send by default, and how that ends."""
    try:
        OpenAI(base_url=V1, api_key=KEY, max_retries=0).embeddings.create(model="tiny", input=[[99906, 1917]])
    except BadRequestError as error:
        return error.message
    return ""


print(
    json.dumps(
        {
            "vectors": {
                "openai": by_openai(),
                "openai in numbers": by_openai_in_numbers(),
                "langchain": by_langchain(),
                "litellm": by_litellm("openai"),
                "litellm as vLLM": by_litellm("hosted_vllm"),
                "llama-index": by_llama_index(),
            },
            "ranks": {
                "litellm as vLLM": litellm_ranks("hosted_vllm", URL),
                "litellm as Cohere": litellm_ranks("cohere", URL),
                "litellm as Jina": litellm_ranks("jina_ai", V1),
                "litellm as Hugging Face": litellm_ranks("huggingface", URL),
                "cohere": cohere_ranks(cohere.ClientV2(api_key=KEY, base_url=URL)),
                "cohere, version 1": cohere_ranks(cohere.Client(api_key=KEY, base_url=URL)),
                "llama-index": llama_index_ranks(),
            },
            "foreign ids": foreign_ids(),
        }
    )
)
