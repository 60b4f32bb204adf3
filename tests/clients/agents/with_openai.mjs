// npm's `openai`: its runner of tools over chats, and a loop of strict tools over streamed responses.
import OpenAI from "openai";
import { PROMPT, results, url } from "./two_tools.mjs";

const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
};
const messages = [{ role: "user", content: PROMPT }];
const found = {};

const tools = Object.entries(results).map(([name, run]) => ({
  type: "function", function: { name, description: `Tell the ${name}.`, parameters, parse: JSON.parse, function: run },
}));
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model: "tiny", messages, tools, stream, temperature: 0 });
  let deltas = "";
  if (stream) runner.on("content", (delta) => (deltas += delta));
  found[stream ? "chat streamed" : "chat"] = await runner.finalContent();
  if (stream) found["chat deltas"] = deltas;
}

const offered = Object.keys(results).map((name) => ({ type: "function", name, parameters, strict: true }));
const input = [...messages];
while (!("responses streamed" in found)) {
  const stream = client.responses.stream({ model: "tiny", input, tools: offered, temperature: 0 });
  let deltas = "";
  stream.on("response.output_text.delta", (event) => (deltas += event.delta));
  const answer = await stream.finalResponse();
  const calls = answer.output.filter((item) => item.type === "function_call");
  if (!calls.length) Object.assign(found, { "responses streamed": answer.output_text, "responses deltas": deltas });
  input.push(...answer.output);
  for (const { name, call_id, arguments: given } of calls)
    input.push({ type: "function_call_output", call_id, output: results[name](JSON.parse(given)) });
}
console.log(JSON.stringify(found));
