// npm's `ai` over chats (its own provider and the one for compatible servers), responses and messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { PROMPT, results, url } from "./two_tools.mjs";

const openai = createOpenAI({ baseURL: url + "/v1", apiKey: "none" });
const models = {
  chat: openai.chat("tiny"),
  "chat compatible": createOpenAICompatible({ name: "kvmesh", baseURL: url + "/v1" }).chatModel("tiny"),
  responses: openai.responses("tiny"),
  messages: createAnthropic({ baseURL: url + "/v1", apiKey: "none" })("tiny"),
};
const tools = {};
for (const [name, execute] of Object.entries(results))
  tools[name] = tool({ description: `Tell the ${name}.`, inputSchema: z.object({ city: z.string() }), execute });
const found = {};
for (const [name, model] of Object.entries(models)) {
  const asked = { model, tools, prompt: PROMPT, maxOutputTokens: 200, maxRetries: 0, stopWhen: stepCountIs(3) };
  found[name] = (await generateText({ ...asked, temperature: 0 })).text;
  let streamed = "";
  const onError = ({ error }) => (streamed += error);
  for await (const part of streamText({ ...asked, temperature: 0, onError }).textStream) streamed += part;
  found[name + " streamed"] = streamed;
}
console.log(JSON.stringify(found));
