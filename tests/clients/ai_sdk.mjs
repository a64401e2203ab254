// The AI SDK checks every chunk against its schema.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
const [url, model] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "edgellm", baseURL: url, includeUsage: true });
const options = { model: provider(model), prompt: "Say hello.", maxRetries: 0, seed: 1 };
const whole = await generateText({ ...options, maxOutputTokens: 12 });
if (!whole.text || !whole.usage.outputTokens) throw new Error("no text");
const stream = streamText({ ...options, maxOutputTokens: 12 });
let text = "";
for await (const part of stream.textStream) text += part;
if (!text || !(await stream.usage).outputTokens) throw new Error("no stream");
const weather = tool({ description: "The weather", inputSchema: jsonSchema({
  type: "object", properties: { city: { type: "string" } }, required: ["city"] }) });
const called = streamText({ ...options, maxOutputTokens: 200, tools: { weather }, toolChoice: "required" });
let calls = 0;
for await (const part of called.fullStream) if (part.type === "tool-call") calls += 1;
if (!calls) throw new Error("no call");
console.log("ok");
