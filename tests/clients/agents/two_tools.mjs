// What every agent here is asked, and the tools that it has for it. Arguments: URL.
export const url = process.argv[2];
export const PROMPT = "What is the weather in Rome and what time is it in Paris?";
export const results = {
  weather: ({ city }) => (city === "Rome" ? "21 degrees and sunny" : "no weather in " + city),
  time: ({ city }) => (city === "Paris" ? "12:30" : "no time in " + city),
};
