// The client `openai` in TypeScript against a running server: models, completions, streams, errors.
//
//     node check_openai.js http://127.0.0.1:8000 novel
//
// It is compiled by tsc in its strict form, so the answers must also have the types that the client declares.
import OpenAI from "openai";

function check(condition: boolean, what: string): void {
  if (!condition) throw new Error(what);
}

async function refused(client: OpenAI, body: OpenAI.CompletionCreateParamsNonStreaming, status: number): Promise<void> {
  try {
    await client.completions.create(body);
  } catch (error) {
    check(error instanceof OpenAI.APIError && error.status === status, `expected ${status}, got ${error}`);
    return;
  }
  throw new Error(`a request was accepted that should get ${status}`);
}

async function main(): Promise<void> {
  const [url, model] = process.argv.slice(2);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

  const names: string[] = [];
  for await (const one of client.models.list()) names.push(one.id);
  check(names.includes(model), "the model is not listed");

  const asked = { model, prompt: "It is", max_tokens: 20, seed: 1, logprobs: 2 };
  const whole = await client.completions.create(asked);
  let text = "";
  let tokens: string[] = [];
  let usage: OpenAI.CompletionUsage | null | undefined;
  const parts = await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const part of parts) {
    for (const choice of part.choices) {
      text += choice.text;
      tokens = tokens.concat(choice.logprobs?.tokens ?? []);
    }
    usage = part.usage ?? usage;
  }
  check(text === whole.choices[0].text, "the stream and the whole answer differ");
  check(JSON.stringify(tokens) === JSON.stringify(whole.choices[0].logprobs?.tokens), "the tokens differ");
  check(usage?.completion_tokens === whole.usage?.completion_tokens, "the usage differs");

  const stopped = new AbortController();
  const long = { model, prompt: "It", max_tokens: 4000 };
  const stream = await client.completions.create({ ...long, stream: true }, { signal: stopped.signal });
  let taken = 0;
  for await (const part of stream) {
    taken += part.choices.length;
    if (taken === 5) stopped.abort();
  }
  check(taken < 100, "an aborted stream goes on");

  await refused(client, { model: "none", prompt: "a" }, 404);
  await refused(client, { model, prompt: "a", max_tokens: -1 }, 422);
  await refused(client, { model, prompt: "a", suffix: "b" }, 400);
  console.log("openai in TypeScript: good");
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});
