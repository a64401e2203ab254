// openai (npm): whole, stream with usage, tools, an error.
import OpenAI from "openai";
const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const whole = await client.chat.completions.create({ model, messages, max_tokens: 12 });
if (!whole.choices[0].message.content) throw new Error("no content");
let text = "", usage;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 12, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
if (!text || !usage.completion_tokens) throw new Error("no stream");
const tools = [{ type: "function", function: { name: "weather", parameters: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const called = await client.chat.completions.create({
  model, messages, tools, tool_choice: "required", max_tokens: 200, seed: 1, parallel_tool_calls: false });
JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);
try {
  await client.chat.completions.create({ model: "nothing", messages });
  throw new Error("no 404");
} catch (error) { if (error.status !== 404) throw error; }
console.log("ok");
